"""The loop: roll out, judge, score once, train E epochs, move the KL coefficient, hand the weights to the sampler.

Everything random follows from the recipe's seed and counters, and all state is in ``Progress``, the block in flight
and the tensors of model and optimizer, so a run that is stopped anywhere goes on bitwise.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from logitless.data.packing import StepPlan, plan_epoch
from logitless.data.prompts import PromptOrder
from logitless.errors import TrainingError
from logitless.objective.divergence import kl_in_reward
from logitless.objective.entropy import EntropyController
from logitless.objective.kl_control import KLController
from logitless.objective.objective import BlockStatistics
from logitless.objective.presets import Algorithm
from logitless.rewards.contract import WeightedReward
from logitless.rollout.engine import Engine
from logitless.train import checkpoint as checkpoints
from logitless.train.block import (
    Block,
    advantage_metrics,
    advantages_of,
    block_metrics,
    derived_seed,
    micro_batches_of,
    packed,
    roll_out,
    score,
    signal,
    value_metrics,
    with_advantages,
)
from logitless.train.config import KLInLoss, KLInReward, Recipe
from logitless.train.evaluate import evaluate
from logitless.train.interrupt import Interrupt
from logitless.train.live_view import LiveView
from logitless.train.memory import peak_memory
from logitless.train.metrics import Numbers
from logitless.train.optimizer import adamw, learning_rate, take_step
from logitless.train.policy import Policy, Scorer
from logitless.train.run_folder import RunFolder
from logitless.train.setup import Data, value_head_section
from logitless.train.step import backward, step_batch, step_metrics
from logitless.train.writers import Writer
from logitless.types import Group, TokenBatch


@dataclass
class Progress:
    """Where a run stands; what is not a tensor of its state.

    Args:
        block: blocks finished.
        epoch: epochs finished of the block in flight.
        step_in_epoch: steps finished of the epoch in flight.
        step: optimizer steps done, skipped ones included.
        skipped, skipped_in_a_row: steps without a finite gradient.
        without_signal_in_a_row: blocks without a step to take.
        epoch_kl: sum and number of the steps' KL in the epoch in flight, for a controller that moves once an epoch.
        lines: of metrics written.
        seconds: by phase.
        summary: what ``summary.json`` says so far.
    """

    block: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    without_signal_in_a_row: int = 0
    epoch_kl: list[float] = field(default_factory=list)
    lines: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    summary: dict[str, float] = field(default_factory=dict)


class Trainer:
    """One run, from its first rollout to its last checkpoint.

    Args:
        recipe: checked.
        algorithm: objective, advantage, weighting and value loss of the recipe.
        policy: trained in place.
        reference: scores under the frozen policy, or None without a KL.
        tokenizer: saved beside the weights.
        engine: gives the completions to train on.
        evaluation_engine: samples with the policy's weights.
        rewards: judge completions.
        data: prompts.
        folder: where everything is written.
        view: what the user sees.
        writers: other places that metrics go to.
    """

    def __init__(
        self,
        recipe: Recipe,
        algorithm: Algorithm,
        policy: Policy,
        reference: Scorer | None,
        tokenizer: PreTrainedTokenizerBase,
        engine: Engine,
        evaluation_engine: Engine,
        rewards: tuple[WeightedReward, ...],
        data: Data,
        folder: RunFolder,
        view: LiveView,
        writers: Sequence[Writer],
    ) -> None:
        self.recipe, self.algorithm, self.policy, self.reference = recipe, algorithm, policy, reference
        self.tokenizer, self.engine, self.evaluation_engine = tokenizer, engine, evaluation_engine
        self.rewards, self.data = rewards, data
        self.folder, self.view, self.writers = folder, view, writers
        self.optimizer = adamw(
            policy.model.parameters(),
            recipe.train.optimizer,
            policy.device,
            value_head=() if policy.value_head is None else policy.value_head.parameters(),
            value_head_factor=value_head_section(recipe).learning_rate_factor,
        )
        self.order = PromptOrder(len(data.train), derived_seed(recipe.seed, "order"))
        self.controller = KLController(recipe.kl.control) if recipe.kl is not None else None
        bonus = algorithm.objective.entropy_bonus
        self.entropy_controller = EntropyController(bonus) if bonus is not None and bonus.adaptive else None
        self.progress = Progress()
        self.block: Block | None = None
        self.sample: tuple[str, str, float] | None = None
        self.interrupt = Interrupt(view.message)
        self.saver = checkpoints.BackgroundSaver(folder.checkpoints, keep=recipe.checkpoint.keep)

    def run(self) -> bool:
        """Train to the end, or to Ctrl-C; returns whether the run is complete. Either way a checkpoint is saved."""
        with self.interrupt.heard():
            if not checkpoints.checkpoints(self.folder.checkpoints):
                self._write(self._evaluation("accuracy_before"))
                self.save()
                self.saver.wait()
            while self.progress.block < self.recipe.train.blocks and not self.interrupt.requested:
                self._block()
                if self.interrupt.requested or self.progress.block % self.recipe.checkpoint.every_blocks == 0:
                    self.save()
            self.save()
            self.saver.wait()
        return self.progress.block == self.recipe.train.blocks

    def _block(self) -> None:
        """Collect a block unless one is in flight, and train on it until its end or Ctrl-C."""
        if self.block is None:
            self.block = self._collected()
        if self.block is None:
            return
        if self.block.batch.num_tokens:
            self.progress.without_signal_in_a_row = 0
            self._train(self.block)
            if self.progress.epoch < self.recipe.train.epochs_per_block:
                return
        else:
            self._pass_over(self.block)
        self.progress.block, self.progress.epoch, self.block = self.progress.block + 1, 0, None
        self.engine.update_weights(self.policy.model, version=self.progress.block)

    def _train(self, block: Block) -> None:
        """The epochs over a block, until their end or Ctrl-C."""
        progress, objective, dropped = self.progress, self.algorithm.objective, self._dropped(block)
        kept = (~torch.tensor(dropped)).float()
        generator = torch.Generator().manual_seed(derived_seed(self.recipe.seed, "selection", progress.block))
        statistics = objective.block_statistics(
            replace(block.batch, token_weight=kept[block.batch.sequence]), generator=generator
        )
        batch = block.batch if statistics is None else statistics.attach(block.batch)
        while progress.epoch < self.recipe.train.epochs_per_block:
            plan = self._plan(block, progress.epoch)
            while progress.step_in_epoch < len(plan):
                if self.interrupt.requested:
                    return
                with self._phase("training") as seconds:
                    micro_batches = step_batch(
                        batch,
                        plan[progress.step_in_epoch],
                        objective,
                        self.algorithm.weighting,
                        dropped=dropped,
                        num_steps=len(plan),
                        statistics=statistics,
                    )
                    record = self._step(micro_batches, statistics)
                record["time/training_seconds"] = seconds[0]
                record["throughput/training_tokens_per_second"] = record["optimizer/tokens"] / seconds[0]
                progress.step_in_epoch += 1
                if progress.epoch == 0 and progress.step_in_epoch == 1:
                    record |= block.metrics
                if progress.epoch == self.recipe.train.epochs_per_block - 1 and progress.step_in_epoch == len(plan):
                    record |= self._evaluation_if_due()
                self._write(record)
                self._check_skipped()
            self._end_of_epoch()

    def _pass_over(self, block: Block) -> None:
        """Write the metrics of a block with nothing to train on; too many in a row end the run."""
        progress, limit = self.progress, self.recipe.train.max_blocks_without_signal
        self._write({**block.metrics, **self._evaluation_if_due()})
        self.view.message(f"block {progress.block + 1}: no group with a signal, no step taken")
        progress.without_signal_in_a_row += 1
        if progress.without_signal_in_a_row >= limit:
            raise TrainingError(
                needed="completions of a prompt that differ in reward",
                given=f"none in {limit} blocks (train.max_blocks_without_signal)",
                remedy="Choose an easier task, warm-start the policy, raise the temperature or the group size.",
            )

    def _step(self, micro_batches: list[TokenBatch], statistics: BlockStatistics | None) -> Numbers:
        """One optimizer step and its numbers."""
        recipe, progress = self.recipe, self.progress
        outputs = backward(
            self.policy,
            self.algorithm.objective,
            micro_batches,
            temperature=recipe.rollout.sampling.temperature,
            backend=recipe.train.training_backend,
            beta=self._beta() if isinstance(recipe.kl, KLInLoss) else 0.0,
            entropy_coefficient=None if self.entropy_controller is None else self.entropy_controller.applied,
            statistics=statistics,
            seed=derived_seed(recipe.seed, "step", progress.step),
            value_loss=self.algorithm.value_loss,
        )
        rate = learning_rate(progress.step, progress.block / recipe.train.blocks, recipe.train.optimizer)
        self.saver.wait()
        norm, taken = take_step(self.optimizer, rate=rate, max_grad_norm=recipe.train.max_grad_norm)
        progress.step += 1
        progress.skipped += not taken
        progress.skipped_in_a_row = 0 if taken else progress.skipped_in_a_row + 1
        record = step_metrics(outputs) | {
            "optimizer/grad_norm": float(norm),
            "optimizer/learning_rate": rate,
            "optimizer/sequences": sum(b.num_sequences for b in micro_batches),
            "optimizer/micro_batches": len(micro_batches),
            "optimizer/skipped_steps": progress.skipped,
        }
        self._control(record, micro_batches, taken=taken)
        return record

    def _check_skipped(self) -> None:
        """Say that a step was skipped; too many in a row end the run."""
        progress = self.progress
        if progress.skipped_in_a_row:
            self.view.message(f"step {progress.step} skipped: its gradient is not finite")
        if progress.skipped_in_a_row >= self.recipe.train.max_skipped_in_a_row:
            raise TrainingError(
                needed="finite gradients",
                given=f"{progress.skipped_in_a_row} steps in a row without (train.max_skipped_in_a_row)",
                remedy="Lower the learning rate, or go on from the last checkpoint with --resume.",
            )

    def _control(self, record: Numbers, micro_batches: list[TokenBatch], *, taken: bool) -> None:
        """Record the coefficients of this step; let their controllers see it, unless it was skipped."""
        bonus, kl = self.algorithm.objective.entropy_bonus, self.recipe.kl
        if bonus is not None:
            adaptive = self.entropy_controller
            record["entropy/bonus_coefficient"] = bonus.coefficient if adaptive is None else adaptive.applied
            if adaptive is not None and taken:
                adaptive.update(record["entropy/bonus_mean"])
        if kl is None or self.controller is None:
            return
        record["kl_ref/beta"] = self.controller.beta
        if taken:
            if isinstance(kl, KLInLoss):
                seen = record[f"kl_ref/{kl.penalty.estimator}_mean"]
            else:
                seen = float(torch.cat([_drift(b) for b in micro_batches]).mean())
            record["kl_ref/controlled"] = seen
            if math.isfinite(seen):  # exp can overflow; the line then says null
                self.progress.epoch_kl.append(seen)
                if kl.update == "step":
                    self.controller.update(seen, sum(b.num_sequences for b in micro_batches))
        record["kl_ref/guarded"] = self.controller.num_guarded
        record["kl_ref/bounded"] = self.controller.num_bounded

    def _end_of_epoch(self) -> None:
        progress, kl = self.progress, self.recipe.kl
        if kl is not None and self.controller is not None and kl.update == "epoch" and progress.epoch_kl:
            assert self.block is not None
            self.controller.update(sum(progress.epoch_kl) / len(progress.epoch_kl), self.block.batch.num_sequences)
        progress.epoch, progress.step_in_epoch, progress.epoch_kl = progress.epoch + 1, 0, []

    def _collected(self) -> Block | None:
        """The next block; None where Ctrl-C gave it up, without a trace."""
        before = self.order.state_dict()
        try:
            with self.interrupt.at_once():
                return self._collect()
        except KeyboardInterrupt:
            self.order.load_state_dict(before)
            return None

    def _collect(self) -> Block:
        """Roll out, judge, score and give advantages; without a token where no group is left to train on."""
        recipe, number = self.recipe, self.progress.block
        with self._phase("rollout") as rollout_seconds:
            drawn, kept, rounds = self._rolled_out()
        trained = [g for g, k in zip(drawn, kept, strict=True) if k]
        metrics = block_metrics(drawn, num_trained=len(trained), rounds=rounds)
        metrics["time/rollout_seconds"] = rollout_seconds[0]
        sampled = sum(c.length for g in drawn for c in g.completions)
        metrics["throughput/rollout_tokens_per_second"] = sampled / rollout_seconds[0]
        self.progress.summary.setdefault("reward_first_block", metrics["reward/mean"])
        self.progress.summary["reward_last_block"] = metrics["reward/mean"]
        batch, members = packed(trained)
        block = Block(
            batch, members, tuple(c.finish_reason == "length" for g in trained for c in g.completions), metrics
        )
        if not batch.num_tokens:
            self.folder.write_rollouts(number + 1, drawn)
            return block
        rows = micro_batches_of(self._plan(block, 0))
        temperature, backend = recipe.rollout.sampling.temperature, recipe.train.scoring_backend
        with self._phase("scoring") as scoring_seconds:
            old = score(self.policy, batch, rows, temperature=temperature, backend=backend)
            batch = replace(batch, logp_old=old.logp, entropy_old=old.entropy, value_old=old.value)
            if self.reference is not None:
                ref = score(self.reference, batch, rows, temperature=temperature, backend=backend)
                batch = replace(batch, logp_ref=ref.logp)
        num_scored = batch.num_tokens * (1 if self.reference is None else 2)
        metrics["time/scoring_seconds"] = scoring_seconds[0]
        metrics["throughput/scoring_tokens_per_second"] = num_scored / scoring_seconds[0]
        estimator = self.algorithm.advantage
        batch = with_advantages(
            batch,
            trained,
            estimator,
            weights={r.name: r.weight for r in self.rewards},
            kl_beta=self._beta() if isinstance(recipe.kl, KLInReward) else 0.0,
        )
        advantages = advantages_of(batch, drawn, kept)
        metrics |= advantage_metrics(advantages, None if estimator is None else estimator.clip)
        metrics |= value_metrics(batch)
        self.folder.write_rollouts(number + 1, drawn, advantages)
        first = drawn[0]
        self.sample = (first.prompt.text, first.completions[0].text, first.rewards[0] or 0.0)
        return replace(block, batch=batch)

    def _rolled_out(self) -> tuple[list[Group], list[bool], int]:
        """The groups of a block, which of them are trained on, and the rounds of generation that they took."""
        options, sampling = self.recipe.rollout, self.recipe.rollout.sampling
        if self.controller is not None and self.controller.rollout_factor != 1:
            shorter = max(1, int(sampling.max_new_tokens * self.controller.rollout_factor))
            sampling = replace(sampling, max_new_tokens=shorter)
        drawn, kept, rounds = list[Group](), list[bool](), 0
        limit = 1 + (options.max_refills if options.zero_signal == "refill" else 0)
        while rounds < limit and sum(kept) < options.prompts_per_block:
            indices = self.order.next(options.prompts_per_block - sum(kept))
            groups = roll_out(
                self.engine,
                [self.data.train[i] for i in indices],
                self.rewards,
                num_samples=options.completions_per_prompt,
                sampling=sampling,
                unscored=options.unscored,
                seed=derived_seed(self.recipe.seed, "rollout", self.progress.block, rounds),
            )
            drawn += groups
            kept += [True] * len(groups) if options.zero_signal == "keep" else signal(groups)
            rounds += 1
        return drawn, kept, rounds

    def _plan(self, block: Block, epoch: int) -> list[StepPlan]:
        """The optimizer steps of an epoch; completions that are all empty make none."""
        assert block.batch.inputs is not None
        steps = plan_epoch(
            block.groups,
            block.batch.inputs,
            tokens_per_step=self.recipe.train.tokens_per_step,
            tokens_per_micro_batch=self.recipe.train.tokens_per_micro_batch,
            seed=derived_seed(self.recipe.seed, "epoch", self.progress.block, epoch),
        )
        return [step for step in steps if step.micro_batches]

    def _dropped(self, block: Block) -> list[bool]:
        """Completions whose tokens weigh 0."""
        return [t and self.recipe.train.drop_truncated for t in block.truncated]

    def _beta(self) -> float:
        return 0.0 if self.controller is None else self.controller.beta

    def _evaluation_if_due(self) -> Numbers:
        """Held-out metrics at the end of this block, where they are asked for."""
        done = self.progress.block + 1
        due = done % self.recipe.evaluation.every_blocks == 0 or done == self.recipe.train.blocks
        return self._evaluation("accuracy_after") if due else {}

    def _evaluation(self, called: str) -> Numbers:
        """Held-out metrics, which also enter the summary as ``called``; none without held-out prompts."""
        options = self.recipe.evaluation
        if not self.data.held_out:
            return {}
        with self._phase("evaluation") as seconds:
            found = evaluate(
                self.evaluation_engine,
                self.data.held_out,
                self.rewards,
                num_samples=options.samples_per_prompt,
                sampling=options.sampling or self.recipe.rollout.sampling.greedy(),
                unscored=self.recipe.rollout.unscored,
                success_at=options.success_at,
                seed=derived_seed(self.recipe.seed, "evaluation"),
            )
        self.progress.summary[called] = found["evaluation/accuracy"]
        return found | {"time/evaluation_seconds": seconds[0]}

    def _write(self, record: Numbers) -> None:
        """One line of metrics for the step just done."""
        progress = self.progress
        record = {
            "step": progress.step,
            "block": min(progress.block + 1, self.recipe.train.blocks),
            "epoch": progress.epoch + 1,
            **record,
            "memory/peak_bytes": peak_memory(self.policy.device),
            "time/elapsed_seconds": sum(progress.seconds.values()),
        }
        self.folder.append_metrics(record)
        progress.lines += 1
        for writer in self.writers:
            writer.write(record)
        self.view.update(record, self.sample)

    def summary(self) -> dict[str, Any]:
        """What ``summary.json`` holds."""
        progress = self.progress
        return {
            "name": self.recipe.name,
            "blocks": progress.block,
            "steps": progress.step,
            "skipped_steps": progress.skipped,
            **progress.summary,
            "seconds": progress.seconds,
            "peak_memory_bytes": peak_memory(self.policy.device),
        }

    def save(self) -> None:
        """A checkpoint of everything; see ``checkpoint.py``."""
        with self._phase("checkpoint"):
            parameters = self.policy.named_parameters()
            tensors = checkpoints.optimizer_tensors(parameters, self.optimizer) | checkpoints.random_tensors()
            tensors |= checkpoints.parameter_tensors(parameters)
            state: dict[str, Any] = {
                "progress": asdict(self.progress),
                "order": self.order.state_dict(),
                "controller": None if self.controller is None else self.controller.state_dict(),
                "entropy": None if self.entropy_controller is None else self.entropy_controller.state_dict(),
                "random": checkpoints.random_state(),
                "block": None,
            }
            if self.block is not None:
                inputs = self.block.batch.inputs
                assert inputs is not None
                tensors |= checkpoints.batch_tensors(self.block.batch)
                state["block"] = {
                    "groups": self.block.groups,
                    "truncated": self.block.truncated,
                    "metrics": dict(self.block.metrics),
                    "lengths": inputs.lengths,
                    "source_counts": inputs.source_counts,
                }
            self.saver.save(block=self.progress.block, step=self.progress.step, tensors=tensors, state=state)

    def restore(self, saved: checkpoints.Checkpoint) -> None:
        """Go on from a checkpoint whose weights the policy already has; later lines of metrics are removed."""
        state = saved.state
        self.progress = Progress(**state["progress"])
        self.order.load_state_dict(state["order"])
        if self.controller is not None:
            self.controller.load_state_dict(state["controller"])
        if self.entropy_controller is not None:
            self.entropy_controller.load_state_dict(state["entropy"])
        checkpoints.restore_parameters(self.policy.named_parameters(), saved.tensors)
        checkpoints.restore_optimizer(self.policy.named_parameters(), self.optimizer, saved.tensors)
        checkpoints.restore_random(saved.tensors, state["random"])
        block = state["block"]
        if block is not None:
            self.block = Block(
                batch=checkpoints.restore_batch(saved.tensors, block["lengths"], block["source_counts"]),
                groups=tuple(tuple(g) for g in block["groups"]),
                truncated=tuple(block["truncated"]),
                metrics=block["metrics"],
            )
        self.folder.truncate_metrics(self.progress.lines)

    @contextmanager
    def _phase(self, name: str) -> Iterator[list[float]]:
        """Time a phase; the seconds are in the list afterwards."""
        self.view.phase(name)
        seconds = [0.0]
        start = time.perf_counter()
        try:
            yield seconds
        finally:
            seconds[0] = time.perf_counter() - start
            self.progress.seconds[name] = self.progress.seconds.get(name, 0.0) + seconds[0]


def _drift(batch: TokenBatch) -> Float[Tensor, "N"]:
    assert batch.logp_old is not None
    assert batch.logp_ref is not None
    return kl_in_reward(batch.logp_old, batch.logp_ref)
