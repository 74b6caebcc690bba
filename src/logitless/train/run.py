"""A run from its recipe: made anew, or continued from its latest checkpoint."""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from logitless.distributed.arrangement import Arrangement
from logitless.distributed.failing import failing_together
from logitless.distributed.ranks import Ranks
from logitless.errors import ConfigurationError
from logitless.head.contract import on_device
from logitless.models.value_head import save_value_head
from logitless.objective.algorithm import Algorithm
from logitless.rollout.environment import Driver, Environment
from logitless.rollout.environments import environment_of
from logitless.rollout.tool_environment import tools_of
from logitless.seeds import derived_seed
from logitless.train.ahead import LOG, collector_of
from logitless.train.callbacks import Callback, Callbacks
from logitless.train.changes import Change, as_json, check_resumed, in_words
from logitless.train.checkpoint import (
    Checkpoint,
    checkpoints,
    clear_remains,
    damaged,
    load_checkpoint,
    read_checkpoint,
    restore_parameters,
)
from logitless.train.checks import arrangement_of, check_before_start
from logitless.train.config import Recipe, RecordedEngineSection
from logitless.train.costly import costly_choices
from logitless.train.engines import Engines, engines_on, open_engines
from logitless.train.evaluate import evaluation_of
from logitless.train.forecast import scores_all_rows
from logitless.train.fork import Parent, carried, check_fork, parent_of
from logitless.train.journal import Journal
from logitless.train.learner import Learner
from logitless.train.live_view import LiveView
from logitless.train.long_lived import left_alone
from logitless.train.loop import Loop
from logitless.train.optimizer import implementation
from logitless.train.plan import check_disk, disk
from logitless.train.policies import policies_of, policy_of
from logitless.train.policy import Policy, Scorer
from logitless.train.provenance import digest_of_file, digest_of_log, digest_of_prompts, parent_in, record_start
from logitless.train.provenance import environment as made_with
from logitless.train.recipe import dump_recipe, load_recipe
from logitless.train.report import write_report
from logitless.train.result import RunResult, exported_in_words
from logitless.train.run_folder import (
    WARM_START,
    RunFolder,
    create_run_folder,
    open_run_folder,
    write_folder_atomically,
)
from logitless.train.run_lock import locked
from logitless.train.setup import (
    Data,
    after_warm_start,
    algorithm_of,
    data_of,
    device_of,
    effects,
    is_cut_from_host,
    order_of,
    policy_model,
    rewards_of,
    section_for,
    set_process,
    tokenizer_of,
    value_head_of,
    value_head_section,
)
from logitless.train.wall_clock import UNNAMED, WallClock, compilations_told
from logitless.train.warm_start import warm_start
from logitless.train.writers import check_writers, open_writers

logger = logging.getLogger("logitless")

FOLDER = "the run's folder, which the first rank opens,"
OpenEngines: TypeAlias = Callable[[Recipe, nn.Module, PreTrainedTokenizerBase], Engines]


def start(recipe: Recipe, **options: Any) -> tuple[RunFolder, bool]:
    """``run_recipe``, of which most callers want the folder and whether the run is complete.

    Args:
        recipe: checked.
        **options: of ``run_recipe``.
    """
    result = run_recipe(recipe, **options)
    return result.folder, result.complete


def run_recipe(
    recipe: Recipe,
    *,
    numbered: bool = False,
    resume: bool | Literal["auto"] = False,
    fork: str | None = None,
    open_engines: OpenEngines = open_engines,
    environment: Environment | Driver | None = None,
    callbacks: Sequence[Callback] = (),
    ranks: Ranks = Ranks.alone(),
    clock: WallClock | None = None,
) -> RunResult:
    """Run a recipe, or continue it.

    Args:
        recipe: checked.
        numbered: where the name is taken, take ``name-2``, ``name-3``, ...
        resume: continue the run of this name from its latest checkpoint; ``auto``: where there is one, else start it.
            ``changes.py`` says in which keys the recipe may differ from the one that the run was started with.
        fork: ``RUN`` or ``RUN:CHECKPOINT``, whose weights, optimizer state and place a new run starts from
            (``fork.py``); None for the recipe's weights. Beside ``resume="auto"`` it is where the run starts.
        open_engines: what opens the engines, from the recipe, the model and its tokenizer; for engines that no recipe
            names.
        environment: what answers the policy, its messages with their tokens; None for the recipe's.
        callbacks: are told what happens, on the first rank.
        ranks: that train together; each calls this with the same recipe, and the first one writes.
        clock: that has run since the process began; None for one that begins here.

    Raises:
        LogitlessError: anything that is wrong with the recipe, the data, the model or the machine, and a run that
            cannot go on.
    """
    clock = clock or WallClock()
    clock.outside("start")
    _check_choice(numbered, resume, fork)
    arrangement = arrangement_of(recipe, ranks.world)
    ranks = ranks.arranged(arrangement)
    built = recipe.model_copy(update={"model": section_for(recipe.model, arrangement)})
    set_process(recipe.model, seed=derived_seed(recipe.seed, "process"))
    clock.outside("data")
    tokenizer = tokenizer_of(recipe.model)
    if environment is None:
        environment = environment_of(recipe.rollout.environment, tokenizer, recipe.model.chat_template_kwargs)
    data = data_of(recipe, tokenizer, tools_of(environment))
    _check_same_on_all(ranks, recipe, data)
    rewards = rewards_of(recipe, data.judged)
    algorithm = algorithm_of(recipe)
    check_writers(recipe.writers)
    clock.outside("start")
    path = Path(recipe.output) / recipe.name
    saved: Checkpoint | None = None
    changed: list[Change] = []
    parent: Parent | None = None
    if resume == "auto":
        resume = bool(ranks.of_first(_is_begun(RunFolder(path), fork)))
    with ExitStack() as stack:
        stack.enter_context(on_device(device_of(recipe.model)))
        if device_of(recipe.model).type == "cuda":
            stack.enter_context(compilations_told(clock))
        if resume:
            with failing_together(ranks, FOLDER):
                folder = open_run_folder(path)
                if ranks.is_first:
                    stack.enter_context(locked(folder.path))
                    changed = check_resumed(load_recipe(folder.config), recipe, algorithm)
                    clear_remains(folder.checkpoints)
            if ranks.of_first(not folder.is_failed_start() or bool(checkpoints(folder.checkpoints))):
                saved = load_checkpoint(folder.checkpoints)
            else:
                with failing_together(ranks, FOLDER):
                    if ranks.is_first:
                        _check_no_fork(folder)
        elif fork is not None:
            with failing_together(ranks, "the run that is forked"):
                parent = parent_of(fork)
                check_fork(parent, recipe, algorithm)
                saved = parent.checkpoint
            named = {"checkpoint that is forked": str(saved.folder)}
            ranks.check_same(named, remedy="Name the checkpoint: the run that is forked has written another one.")
        done = _progress(saved)
        _check_blocks_left(recipe, done["block"], is_fork=parent is not None)
        warm = (path if parent is None else parent.folder.path) / WARM_START
        with clock.phase("model"):
            model = _model(built, tokenizer, warm if saved is not None and warm.exists() else None, arrangement, ranks)
        check_before_start(recipe, data, model)
        with failing_together(ranks, FOLDER):
            if ranks.is_first:
                check_disk(recipe, disk(recipe, model, value_head_of(recipe, algorithm, model)), path)
        with clock.phase("engine"):
            engines = engines_on(ranks, open_engines(recipe, model, tokenizer))
        opened = stack.enter_context(ExitStack())
        opened.callback(engines.close)
        if not resume:
            folder = _new_folder(Path(recipe.output), recipe.name, numbered, ranks)
            recipe = recipe.model_copy(update={"name": folder.path.name})
            if ranks.is_first:
                stack.enter_context(locked(folder.path))
                stack.push(folder.remove_after_failed_start)
        services = stack.enter_context(ExitStack())  # closed before what a failed start left is removed
        services.enter_context(opened.pop_all())
        digests = _digests(recipe, data)
        if ranks.is_first:
            if saved is None or parent is not None:
                folder.clear()
            record_start(
                folder,
                digests,
                device_of(recipe.model),
                step=done["step"],
                changed=as_json(changed),
                parent=None if parent is None else parent.as_json(recipe),
            )
            folder.write_config(dump_recipe(recipe))
            if parent is not None:
                parent.copy_warm_start(folder)
        view = stack.enter_context(
            LiveView(recipe.train.blocks, first_block=done["block"], title=folder.path.name, silent=not ranks.is_first)
        )
        writers = open_writers(
            recipe.writers if ranks.is_first else (),
            folder=folder,
            config=recipe.model_dump(mode="json"),
            first_step=done["step"],
        )
        for writer in writers:
            services.callback(writer.close)
        policy, reference = _policies(built, algorithm, tokenizer, data, folder, view, model, ranks, clock)
        del model
        for each in (policy, reference):
            if isinstance(each, Policy):
                each.share_prompts_unless(ranks.of_first(each.unshared_because))
        if not arrangement.is_sharded:
            ranks.copy_of_first(policy.held().values())
            policy.round_masters()
            if isinstance(reference, Policy):
                ranks.copy_of_first(reference.held().values())
        else:
            mesh = arrangement.mesh(device_of(recipe.model).type, ranks.timeout)
            policy.shard(mesh, made_same=ranks.copy_of_first)
            if isinstance(reference, Policy):
                on_host = recipe.parallel.reference == "host"
                reference.shard(mesh, on_host=on_host, made_same=ranks.copy_of_first)
            all_rows = scores_all_rows(recipe, arrangement, policy.head().weight)
            for each in (policy, reference):
                if isinstance(each, Policy):
                    each.all_rows = all_rows
        if ranks.sequence is not None:
            for each in (policy, reference):
                if isinstance(each, Policy):
                    each.share_sequences(ranks.sequence)
        if ranks.world > 1:
            view.message(f"{ranks.world} processes: {arrangement.words}")
        is_split = built.model.layers != recipe.model.layers
        if is_split:
            view.message("layers transformers' own, for weights or sequences are split over processes")
        for line in costly_choices(built, policy.device, policy.model, is_split=is_split):
            view.message(line)
        journal = Journal(folder, view, writers, policy.device, ranks, clock)
        weights = {r.name: r.weight for r in rewards}
        learner = Learner(recipe, algorithm, policy, reference, reward_weights=weights, ranks=ranks)
        collector = collector_of(
            recipe,
            folder.path,
            *(data.train, engines.training, environment, rewards, recipe.rollout),
            seed=recipe.seed,
            ranks=ranks,
            order=order_of(recipe, data.train),
        )
        services.callback(collector.close)
        held_out = {"held_out": data.held_out, **data.held_out_sets}
        evaluation = evaluation_of(recipe, engines.evaluation, environment, held_out, rewards, ranks)
        told = Callbacks(callbacks, is_first=ranks.is_first)
        loop = Loop(recipe, collector, learner, evaluation, journal, told)
        view.message(f"optimizer AdamW ({implementation(learner.optimizer)})")
        for line in in_words(changed):
            view.message(line)
        if parent is not None:
            saved, lines = carried(parent, recipe, digests, learner, collector)
            for line in lines:
                view.message(line)
        if saved is not None:
            loop.restore(saved)
            if ranks.of_first(any(change.key == "train.tokens_per_micro_batch" for change in changed)):
                learner.progress.halvings.clear()  # they were of the earlier size
        elif resume:
            view.message("no checkpoint yet: from the beginning")
        told.start(folder.path, recipe)
        clock.outside(UNNAMED)
        with left_alone():
            result = loop.run()
        progress = learner.progress
        counts = {"blocks": progress.block, "steps": progress.step, "skipped_steps": progress.skipped}
        summary: dict[str, Any] = {"name": recipe.name, "ended_by": result.ended_by, **counts}
        if result.complete:
            with journal.phase("export"):
                exported = summary["exported"] = _put_back_best(loop, ranks)
                state = policy.whole_state(keep=ranks.is_first)
                if ranks.is_first:
                    _export(policy, tokenizer, folder, state)
            view.message(exported_in_words(exported))
        with journal.phase("closing"):
            services.close()
        journal.write_summary(summary)
        with journal.phase("report"):
            if ranks.is_first:
                write_report(folder.path)
        journal.write_summary(summary)  # with the seconds of the report
    told.end(result)
    return result


def _new_folder(root: Path, name: str, numbered: bool, ranks: Ranks) -> RunFolder:
    """The folder that the first rank makes."""
    with failing_together(ranks, FOLDER):
        made = create_run_folder(root, name, unique=numbered) if ranks.is_first else None
    return RunFolder(Path(ranks.of_first(None if made is None else str(made.path))))


def _model(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, weights: Path | None, arrangement: Arrangement, ranks: Ranks
) -> nn.Module:
    """The model where it starts: whole on the device of each rank, or to be cut from the host's memory.

    Then only the first rank reads it, and the others have its shape, whose weights they are sent when they are cut. An
    architecture that is made otherwise than it is read (some weights or buffers in another dtype) is read by all.
    """
    is_cut = is_cut_from_host(recipe, arrangement)
    device = torch.device("cpu") if is_cut else device_of(recipe.model)

    def made(*, empty: bool) -> nn.Module:
        return policy_model(recipe.model, tokenizer, seed=recipe.seed, device=device, weights=weights, empty=empty)

    with failing_together(ranks, "a model to train"):
        model = made(empty=is_cut and not ranks.is_first)
    if is_cut and ranks.any(_shape(model) != ranks.of_first(_shape(model))):
        if not ranks.is_first:
            return made(empty=False)
        logger.info("every process reads the model, which transformers makes otherwise than it reads it")
    return model


def _shape(model: nn.Module) -> list[list[Any]]:
    """Of each weight and buffer its name, shape and dtype, and whether it is trained."""
    held = [*model.named_parameters(), *model.named_buffers()]
    return [[name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad] for name, tensor in held]


def _policies(
    recipe: Recipe,
    algorithm: Algorithm,
    tokenizer: PreTrainedTokenizerBase,
    data: Data,
    folder: RunFolder,
    view: LiveView,
    model: nn.Module,
    ranks: Ranks,
    clock: WallClock,
) -> tuple[Policy, Scorer | None]:
    """The policy at its starting point and the reference, which is the policy as reinforcement learning began.

    A run that goes on starts there too: its checkpoint is then read into this one model.
    """
    section, warm = recipe.model, folder.warm_start
    for line in effects(section, device_of(section), model):
        view.message(line)
    if recipe.warm_start is not None and ranks.of_first(not warm.exists()):
        view.phase("warm start")
        with clock.phase("warm start"):
            begun = policy_of(recipe, model)
            warm_start(begun, data.warm_start, tokenizer, recipe.warm_start, recipe.train, seed=recipe.seed, view=view)
            if ranks.is_first:
                write_folder_atomically(warm, lambda path: begun.save(path, tokenizer))
            ranks.barrier()
            model = after_warm_start(section, model, seed=recipe.seed)
    policy, reference, activations = policies_of(recipe, algorithm, model)
    if policy.unshared_because is not None:
        view.message(f"prompts are read for each completion: {policy.unshared_because}")
    if activations is not None:
        view.message(f"activations: {activations}")
    if policy.value_head is not None:
        num_weights = sum(p.numel() for p in policy.value_head.parameters())
        factor = value_head_section(recipe).learning_rate_factor
        view.message(f"value head: {num_weights:,} weights, at {factor:g} times the learning rate")
    return policy, reference


def _export(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, folder: RunFolder, state: dict[str, Tensor] | None
) -> None:
    """Leave what was trained in the formats that other programs read."""
    write_folder_atomically(folder.model, lambda path: policy.save(path, tokenizer, state))
    if policy.value_head is not None:
        save_value_head(policy.value_head, folder.value_head)


def _check_choice(numbered: bool, resume: bool | Literal["auto"], fork: str | None) -> None:
    """Refuse what says two things about where a run begins."""
    both = {
        "numbered: a new name where this one is taken, beside resume: the run of this name": numbered and resume,
        "fork: a new run, beside resume: one that is there": fork is not None and resume is True,
    }
    given = [words for words, is_given in both.items() if is_given]
    if given:
        raise ConfigurationError(
            needed="one way to begin",
            given=given[0],
            remedy="Leave one of them out. A fork goes on by --resume alone; --resume-or-start beside --fork forks "
            "where there is no run yet.",
        )


def _is_begun(folder: RunFolder, fork: str | None) -> bool:
    """Whether there is a run to continue; a fork without a checkpoint of its own is begun again."""
    return folder.config.exists() and (fork is None or bool(checkpoints(folder.checkpoints)))


def _check_blocks_left(recipe: Recipe, done: int, *, is_fork: bool) -> None:
    """Refuse a run that has more blocks behind it than it is to have, and a fork that would train on none."""
    least = done + is_fork
    if recipe.train.blocks < least:
        raise ConfigurationError(
            needed=f"train.blocks of at least {least}: those of a checkpoint count",
            given=f"{recipe.train.blocks}, and the checkpoint is from after block {done}",
            remedy="Raise train.blocks" + (", or fork an earlier checkpoint." if is_fork else "."),
        )


def _check_no_fork(folder: RunFolder) -> None:
    """Refuse to begin a fork from the beginning, whose start was stopped before its first checkpoint."""
    parent = parent_in(folder)
    if parent is not None:
        named = f"{parent['run']}:{parent['checkpoint']}"
        raise ConfigurationError(
            needed=f"a checkpoint of the fork in {folder.path}",
            given="none: it was stopped while it started",
            remedy=f"Start it again, without --resume: --fork {named}",
        )


def _put_back_best(loop: Loop, ranks: Ranks) -> dict[str, Any]:
    """Give the policy the weights of the best evaluation, where its checkpoint was kept; says which weights it has.

    Returns:
        ``which`` (``best`` or ``last``), ``block`` and ``step`` of the weights; of the best ``metric`` and ``value``.
    """
    progress, best, path = loop.learner.progress, loop.best, loop.best_checkpoint
    if best is None or path is None:
        return {"which": "last", "block": progress.block, "step": progress.step}
    with failing_together(ranks, "the checkpoint of the best evaluation"):
        policy = loop.learner.policy
        policy.release()  # whole weights were for sampling
        restore_parameters(policy.held(), read_checkpoint(path).tensors)
        policy.round_masters()
    place = {"which": "best", "block": best.block, "step": best.step}
    return {**place, "metric": best.section.metric, "value": best.value}


def _progress(saved: Checkpoint | None) -> dict[str, int]:
    """Blocks and steps done."""
    if saved is None:
        return {"block": 0, "step": 0}
    try:
        return {name: int(saved.state["progress"][name]) for name in ("block", "step")}
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(saved.folder, error) from error


def _check_same_on_all(ranks: Ranks, recipe: Recipe, data: Data) -> None:
    """Refuse ranks that read another recipe or other data, or run another version."""
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


def _digests(recipe: Recipe, data: Data) -> dict[str, str]:
    """Of everything that the run reads as it goes."""
    found = {
        name: digest_of_prompts(prompts)
        for name in ("train", "held_out", "warm_start")
        if (prompts := getattr(data, name))
    } | {f"evaluation.sets.{name}": digest_of_prompts(prompts) for name, prompts in data.held_out_sets.items()}
    engine = recipe.rollout.engine
    if isinstance(engine, RecordedEngineSection):
        path = Path(engine.path)
        found["completions"] = digest_of_log(path / LOG) if path.is_dir() else digest_of_file(path)
    return found
