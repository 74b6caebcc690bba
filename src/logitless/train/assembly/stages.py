"""A run is put together here, in three stages.

    read       recipe           -> Inputs   tokenizer, environment, prompts, rewards, algorithm
    load       Inputs           -> Loaded   the model with its first weights, and the resolved recipe
    assemble   Inputs, Loaded   -> Parts    policy, reference, learner, collector, evaluation

Runs, plans, forecasts and benchmarks use these stages, as many as they need. For prompts, rewards or a model that no
recipe names, construct ``Inputs`` or ``Loaded`` yourself and continue from there.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from logitless.distributed.arrangement import Arrangement
from logitless.distributed.failing import failing_together
from logitless.distributed.ranks import Ranks
from logitless.models.activations import ActivationPlan
from logitless.models.delta_gradients import check_delta_gradients
from logitless.models.router import configured_router_loss
from logitless.objective.algorithm import Algorithm
from logitless.rewards.reward import WeightedReward
from logitless.rollout.environment import Driver, Environment
from logitless.rollout.environments.options import environment_of
from logitless.rollout.environments.tool_environment import tools_of
from logitless.train.assembly.algorithm import algorithm_of
from logitless.train.assembly.checks import arrangement_of
from logitless.train.assembly.costly import costly_choices
from logitless.train.assembly.data import Data, check_columns, data_of, order_of, rewards_of
from logitless.train.assembly.engines import Engines
from logitless.train.assembly.model import is_cut_from_host, policy_model, tokenizer_of
from logitless.train.assembly.policies import centering_line, policies_of, sampler_weights_of, scores_all_rows
from logitless.train.assembly.process import device_of
from logitless.train.assembly.resolve import ENGINE, Resolved, before_loading, resolved
from logitless.train.assembly.sampling import with_sampling
from logitless.train.assembly.servers import check_servers
from logitless.train.assembly.teacher import (
    check_teachers,
    digests_of_teachers,
    layers_lines,
    teacher_line,
    teacher_of,
    teacher_prompts_of,
)
from logitless.train.collect.ahead import collector_of
from logitless.train.collect.collector import Collector
from logitless.train.collect.evaluate import Evaluation, evaluation_of
from logitless.train.collect.refill import OneAtATime
from logitless.train.learn.learner import Learner
from logitless.train.learn.policy import Policy, Scorer
from logitless.train.learn.teacher import Teacher
from logitless.train.learn.teacher_prompts import TeacherPrompts
from logitless.train.optim.optimizer import implementation
from logitless.train.recipe.algorithm import value_head_section
from logitless.train.recipe.config import Recipe
from logitless.train.record.provenance import digest_of_file, digest_of_log, digest_of_prompts
from logitless.train.record.provenance import environment as made_with
from logitless.train.record.run_folder import RunFolder

logger = logging.getLogger("logitless")


@dataclass(frozen=True)
class Inputs:
    """The parts of a recipe that need no model, checked.

    Args:
        recipe: unresolved, but for ``parallel.sampling``.
        arrangement: of the ranks that train.
        tokenizer: of the policy.
        environment: answers the policy.
        data: prompts.
        rewards: score completions.
        algorithm: of the recipe.
        sampling_line: how many processes only sample, where ``auto`` chose them.
    """

    recipe: Recipe
    arrangement: Arrangement
    tokenizer: PreTrainedTokenizerBase
    environment: Environment | Driver
    data: Data
    rewards: tuple[WeightedReward, ...]
    algorithm: Algorithm
    sampling_line: str = ""

    @cached_property
    def digests(self) -> dict[str, str]:
        """SHA-256 of all data that a run reads, by name."""
        return _digests(self.recipe, self.data)


@dataclass(frozen=True)
class Loaded:
    """The model of a recipe, and the resolved recipe.

    Args:
        chosen: the resolved recipe, for everything that is made after the model.
        model: on its device.
    """

    chosen: Resolved
    model: nn.Module

    @property
    def recipe(self) -> Recipe:
        """Resolved."""
        return self.chosen.recipe


@dataclass(frozen=True)
class Parts:
    """The parts of a run, ready to train.

    Args:
        chosen: the resolved recipe.
        inputs: that they were made from.
        engines: that sample.
        learner: with the policy, its reference and its optimizer.
        collector: of blocks.
        evaluation: of held-out prompts.
        activations: plan of what layers keep, if the recipe sets a limit.
    """

    chosen: Resolved
    inputs: Inputs
    engines: Engines
    learner: Learner
    collector: Collector
    evaluation: Evaluation
    activations: ActivationPlan | None

    @property
    def recipe(self) -> Recipe:
        """Resolved."""
        return self.chosen.recipe

    def under(self, recipe: Recipe) -> "Parts":
        """The same parts under other settings of ``rollout`` and ``train``; they share engine and optimizer.

        Args:
            recipe: resolved.
        """
        learner, collector = self.learner.under(recipe), self.collector.under(recipe.rollout)
        return replace(self, chosen=replace(self.chosen, recipe=recipe), learner=learner, collector=collector)


def read(
    recipe: Recipe,
    ranks: Ranks = Ranks.alone(),
    *,
    algorithm: Algorithm | None = None,
    environment: Environment | Driver | None = None,
) -> Inputs:
    """Load all parts of a recipe but its model and engine. A collective.

    Args:
        ranks: of the run; all of them must read the same.
        algorithm: of the recipe; None: made here.
        environment: answers the policy; None for the recipe's.

    Raises:
        LogitlessError: a part is missing here or contradicts the data, or ranks read different recipes or data.
    """
    recipe, line = with_sampling(recipe, ranks.world)
    arrangement = arrangement_of(recipe, ranks.world)
    algorithm = algorithm or algorithm_of(recipe)  # before anything is loaded: a preset may be misspelled
    tokenizer = tokenizer_of(recipe.model)
    if environment is None:
        environment = environment_of(recipe.rollout.environment, tokenizer, recipe.model.chat_template_kwargs)
    data = data_of(recipe, tokenizer, tools_of(environment))
    check_teachers(recipe, tokenizer, data.train)
    with failing_together(ranks, "the recipe's servers"):
        if ranks.is_first:
            check_servers(recipe, data.train)
    check_columns(algorithm.advantage, data.train)
    if ranks.world > 1:
        _check_same_on_all(ranks, recipe, data)
    rewards = rewards_of(recipe, data.judged)
    return Inputs(recipe, arrangement, tokenizer, environment, data, rewards, algorithm, line)


def load(
    inputs: Inputs, ranks: Ranks = Ranks.alone(), *, weights: Path | None = None, device: torch.device | None = None
) -> Loaded:
    """Load the model: whole on the device of each rank, or into host memory, to be sharded from there. A collective.

    In the second case only the first rank reads the weights, and the others make an empty model of the same shape. If
    transformers makes it otherwise than it reads it (weights or buffers of another dtype), every rank reads it.

    Args:
        inputs: of ``read``.
        weights: folder of a warm start; None for the recipe's weights.
        device: None for the recipe's; ``meta`` for a plan.

    Raises:
        LogitlessError: the model cannot be loaded, or not be trained as the recipe says on the recipe's device.
    """
    recipe = before_loading(inputs.recipe, inputs.arrangement)
    is_cut = device is None and is_cut_from_host(recipe, inputs.arrangement)
    if device is None:
        device = torch.device("cpu") if is_cut else device_of(recipe.model)

    def made(*, empty: bool) -> nn.Module:
        return policy_model(
            recipe.model, inputs.tokenizer, seed=recipe.seed, device=device, weights=weights, empty=empty
        )

    with failing_together(ranks, "a model to train"):
        model = made(empty=is_cut and not ranks.is_first)
    if is_cut and ranks.any(_shape(model) != ranks.broadcast_object(_shape(model))):
        if not ranks.is_first:
            model = made(empty=False)
        logger.info("every process reads the model, which transformers makes otherwise than it reads it")
    chosen = resolved(inputs.recipe, model, inputs.arrangement)
    if chosen.recipe.model.layers == "transformers":
        check_delta_gradients(model, device_of(recipe.model))
    if ENGINE in chosen.against and device.type != "meta":
        logger.info("rollout engine: %s", chosen.engine_line)
    if inputs.sampling_line and device.type != "meta":
        logger.info("parallel.sampling: %s", inputs.sampling_line)
    return Loaded(chosen, model)


def assemble(
    inputs: Inputs,
    loaded: Loaded,
    engines: Engines,
    ranks: Ranks = Ranks.alone(),
    *,
    folder: Path | None = None,
    replayed: Path | None = None,
) -> Parts:
    """The parts of a run. A collective.

    Args:
        inputs: of ``read``.
        loaded: of ``load``; its model is trained in place.
        engines: that sample.
        folder: of the run, for the log of blocks that are collected ahead; None: blocks are not collected ahead.
        replayed: folder of the run that this one repeats; None for any other.
    """
    recipe, data, environment = loaded.recipe, inputs.data, inputs.environment
    if not isinstance(environment, Driver):  # threads may collect blocks while this one evaluates
        environment = OneAtATime(environment)
    learner, activations = learner_of(
        recipe,
        inputs.algorithm,
        loaded.model,
        inputs.arrangement,
        ranks,
        rewards=inputs.rewards,
        prompts=teacher_prompts_of(recipe, inputs.tokenizer, tools_of(inputs.environment)),
    )
    collector = collector_of(
        recipe,
        folder,
        *(data.train, engines.training, environment, inputs.rewards),
        ranks=ranks,
        order=order_of(inputs.recipe, data.train),
        greedy_baseline=inputs.algorithm.advantage is not None and inputs.algorithm.advantage.reads_baseline,
        replayed=replayed,
    )
    held_out = {"held_out": data.held_out, **data.held_out_sets}
    evaluation = evaluation_of(recipe, engines.evaluation, environment, held_out, inputs.rewards, ranks)
    return Parts(loaded.chosen, inputs, engines, learner, collector, evaluation, activations)


def learner_of(
    recipe: Recipe,
    algorithm: Algorithm,
    model: nn.Module,
    arrangement: Arrangement,
    ranks: Ranks,
    *,
    rewards: Sequence[WeightedReward] = (),
    prompts: TeacherPrompts | None = None,
    teachers: Mapping[str, nn.Module] = {},
) -> tuple[Learner, ActivationPlan | None]:
    """The learner, and the activation plan if the recipe sets a limit. A collective.

    Args:
        recipe: resolved.
        model: to train.
        rewards: their weights are for advantages that read each reward.
        prompts: of teachers that read others than the policy's.
        teachers: frozen models by their sources, in place of those that would be loaded.
    """
    policy, reference, activations = policies_of(recipe, algorithm, model)
    start = reference if isinstance(reference, Policy) else None
    teacher = teacher_of(recipe, policy, arrangement, start=start, prompts=prompts, models=teachers)
    _distribute(recipe, arrangement, policy, reference, teacher, ranks)
    if not recipe.reads_reference:
        reference = None  # a copy for the teacher alone
    weights = {reward.name: reward.weight for reward in rewards}
    more: Any = {"teacher": teacher, "sampler_weights": sampler_weights_of(recipe, policy)}
    learner = Learner(recipe, algorithm, policy, reference, **more, reward_weights=weights, ranks=ranks)
    return learner, activations


def _distribute(
    recipe: Recipe,
    arrangement: Arrangement,
    policy: Policy,
    reference: Scorer | None,
    teacher: Teacher | None,
    ranks: Ranks,
) -> None:
    """Broadcast the first rank's policy, reference and teacher to all ranks, whole or sharded."""
    taught_by = () if teacher is None else teacher.models
    every = dict.fromkeys((policy, reference, *taught_by))  # a teacher may be the reference too
    copies = [each for each in every if isinstance(each, Policy)]
    waits = {id(each): recipe.teacher is not None and recipe.teacher.place == "host" for each in taught_by}
    waits[id(reference)] = recipe.parallel.reference == "host"
    for each in copies:
        each.share_prompts_unless(ranks.broadcast_object(each.unshared_because))
    if arrangement.is_sharded:
        own = ranks.data if recipe.parallel.num_sampling else None
        mesh = arrangement.mesh(device_of(recipe.model).type, ranks.timeout, own)
        all_rows = scores_all_rows(recipe, arrangement, policy.head().weight)
        for each in copies:
            on_host = waits.get(id(each), False)
            each.shard(mesh, on_host=on_host, made_same=ranks.broadcast, all_rows=all_rows)
    else:
        for each in copies:
            ranks.broadcast(each.held().values())
        policy.round_master_weights()
    if ranks.sequence is not None:
        for each in copies:
            each.share_sequences(ranks.sequence)


def described(parts: Parts, ranks: Ranks) -> Iterator[str]:
    """Lines about the parts of a run, for the user."""
    recipe, policy = parts.recipe, parts.learner.policy
    if policy.unshared_because is not None:
        yield f"prompts are read for each completion: {policy.unshared_because}"
    if parts.activations is not None:
        yield f"activations: {parts.activations}"
    if recipe.teacher is not None:
        assert parts.learner.teacher is not None
        yield teacher_line(recipe.teacher)
        yield from layers_lines(recipe, parts.learner.teacher.own_models, parts.inputs.arrangement)
    yield from centering_line(recipe)
    if policy.value_head is not None:
        num_weights = sum(p.numel() for p in policy.value_head.parameters())
        factor = value_head_section(recipe).learning_rate_factor
        yield f"value head: {num_weights:,} weights, at {factor:g} times the learning rate"
    if coefficient := parts.learner.router_coefficient:
        yield (
            f"load-balancing loss, coefficient {coefficient:g}: zero-advantage completions are read too, and all "
            "micro-batches but the first of each step once more, without gradient"
        )
    elif (default := configured_router_loss(policy.model)) and not parts.recipe.model.router.frozen:
        yield f"no load-balancing loss; the model's config suggests model.router.loss: {default:g}"
    if ranks.world > 1:
        yield f"{ranks.world} processes: {parts.inputs.arrangement.words}"
    if number := recipe.parallel.num_sampling:
        yield f"processes that only sample: {number}"
    yield from costly_choices(parts.chosen, parts.inputs.arrangement, policy.device)
    yield f"optimizer AdamW ({implementation(parts.learner.optimizer)})"


def _digests(recipe: Recipe, data: Data) -> dict[str, str]:
    named = {"train": data.train, "held_out": data.held_out, "warm_start": data.warm_start}
    given = {name: prompts for name, prompts in named.items() if prompts}
    given |= {f"evaluation.sets.{name}": prompts for name, prompts in data.held_out_sets.items()}
    found = {name: digest_of_prompts(prompts) for name, prompts in given.items()}
    if recipe.teacher is not None:
        found |= digests_of_teachers(recipe.teacher)
    engine = recipe.rollout.engine
    if engine.recorded_run is not None:
        found["completions"] = digest_of_log(RunFolder(engine.recorded_run).collected)
    elif engine.recorded_file is not None:
        found["completions"] = digest_of_file(engine.recorded_file)
    return found


def _check_same_on_all(ranks: Ranks, recipe: Recipe, data: Data) -> None:
    """Refuse ranks with different recipes, data or package versions."""
    text = json.dumps(recipe.model_dump(mode="json"), sort_keys=True)
    versions = made_with(torch.device("cpu"))["packages"]
    ranks.check_same(
        {
            "recipe": hashlib.sha256(text.encode()).hexdigest(),
            **{f"data ({name})": digest for name, digest in _digests(recipe, data).items()},
            **{f"version of {name}": version for name, version in versions.items()},
        },
        remedy="Start every process with the same command, files and environment.",
    )


def _shape(model: nn.Module) -> list[list[Any]]:
    """Name, shape, dtype and ``requires_grad`` of each weight and buffer."""
    held = [*model.named_parameters(), *model.named_buffers()]
    return [[name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad] for name, tensor in held]
