"""The learner: the policy with everything that trains it.

    score      once a block, before any step: log-probs and advantages
    begin      once a block: plan its steps, choose its tokens
    step       one optimizer step: token weights, micro-batches, gradients, clipping, update, controllers
    weights    for engines, with ``version``, which tells one state of the weights from another

All randomness comes from the run's seed and the counters in ``Progress``, so that a block that was stopped anywhere
resumes bitwise.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from logitless.data.packing import Packing, StepPlan
from logitless.distributed.ranks import Ranks
from logitless.distributed.tree import TreeSum
from logitless.errors import TrainingError
from logitless.models.router import router_loss_coefficient
from logitless.models.seeded import seeded
from logitless.objective.algorithm import Algorithm
from logitless.objective.distillation import prefix_weight, teacher_advantage
from logitless.objective.inputs import required
from logitless.objective.objective import BlockStatistics
from logitless.objective.over_ranks import GatherOverRanks, one_rank
from logitless.rollout.engine import Weights
from logitless.seeds import derived_seed
from logitless.train.block import PackedBlock, ScoredBlock, micro_batches_of, pack_groups
from logitless.train.learn.compile_ahead import compile_training_kernels
from logitless.train.learn.control import Controllers
from logitless.train.learn.parity_gate import parity_metrics
from logitless.train.learn.policy import Policy, Scorer
from logitless.train.learn.progress import Progress
from logitless.train.learn.routing import RouterLoss, routing_numbers
from logitless.train.learn.rows import RowPlanner
from logitless.train.learn.sampler_weights import SamplerWeights
from logitless.train.learn.score import advantages, scores_of
from logitless.train.learn.step import (
    MicroBatch,
    MicroBatchOutput,
    OptimizerStep,
    backward,
    on_host,
    saved_by_packing,
    step_numbers,
)
from logitless.train.learn.teacher import Teacher
from logitless.train.optim.master_weights import MasterAdamW
from logitless.train.optim.optimizer import adamw, learning_rate, take_step
from logitless.train.recipe.algorithm import value_head_section
from logitless.train.recipe.config import Recipe
from logitless.train.record.metrics import Numbers
from logitless.train.store.stored_block import load_block, stored_block
from logitless.train.store.training_state import (
    optimizer_tensors,
    parameter_tensors,
    restore_optimizer,
    restore_parameters,
)
from logitless.types import Group, TokenBatch, TokenScores


@dataclass(frozen=True)
class _InTraining:
    """A block in training, with what is fixed before its first step.

    Args:
        tokens: the block as the objective reads it, with the tokens that it has chosen.
        dropped: one flag a sequence: True for completions whose tokens have weight 0.
    """

    block: ScoredBlock
    tokens: TokenBatch
    statistics: BlockStatistics | None
    dropped: tuple[bool, ...]
    plans: tuple[tuple[StepPlan, ...], ...]
    packing: Packing


class Learner:
    """Trains a policy on blocks.

    Args:
        reference: the frozen policy; None without a KL.
        teacher: that the policy learns from; None without one.
        sampler_weights: of earlier versions, for score centering; None without it.
        reward_weights: by name, for advantages that read each reward.

    Attributes:
        by_rank: metrics of the last step with a number for each rank; none on a single rank.
        halved: a message if the last step halved its micro-batches because memory was short; else None.
        parity: metrics of the parity gate if the last step computed its ``logp_old``; None if scoring did.
        advantage_state: of an advantage that reads several blocks, after the last block begun.
    """

    def __init__(
        self,
        recipe: Recipe,
        algorithm: Algorithm,
        policy: Policy,
        reference: Scorer | None,
        *,
        teacher: Teacher | None = None,
        sampler_weights: SamplerWeights | None = None,
        reward_weights: Mapping[str, float],
        ranks: Ranks = Ranks.alone(),
    ) -> None:
        self.ranks = ranks
        self.by_rank: dict[str, list[int]] = {}
        self.halved: str | None = None
        self.parity: Numbers | None = None
        self.recipe, self.algorithm, self.policy, self.reference = recipe, algorithm, policy, reference
        self.teacher, self.sampler_weights = teacher, sampler_weights
        self.reward_weights = reward_weights
        self.router_coefficient = router_loss_coefficient(policy.model, recipe.model.router.loss)
        self.optimizer = adamw(
            policy.model.parameters(),
            recipe.train.optimizer,
            policy.device,
            value_head=() if policy.value_head is None else policy.value_head.parameters(),
            value_head_factor=value_head_section(recipe).learning_rate_factor,
        )
        if recipe.train.cuda_graphs and not recipe.parallel.deterministic:  # the latter keeps each row's gradients
            policy.graph_short_rows()
        self.controllers = Controllers(recipe.kl, algorithm)
        self.advantage_state: Mapping[str, float] = {}
        self.progress = Progress()
        self._current: _InTraining | None = None
        self._is_first_step = True

    @property
    def _rows(self) -> RowPlanner:
        return RowPlanner(self.recipe, self.policy, self.ranks, self.progress)

    def under(self, recipe: Recipe) -> "Learner":
        """A learner of the same weights, optimizer and progress under another ``train`` and ``rollout``."""
        other = copy(self)
        other.recipe, other.policy = recipe, self.policy.under(recipe.train)
        return other

    # --- before training on a block

    def packed(self, groups: Sequence[Group]) -> PackedBlock:
        """The completions of groups packed, with what their teachers read."""
        observed = self.algorithm.observations is not None
        block = pack_groups(groups, version=self.version, observed=observed)
        return block if self.teacher is None else self.teacher.attached(block, groups)

    def score(
        self, packed: PackedBlock, groups: Sequence[Group], sampled: TokenScores | None = None, *, rescore: bool = False
    ) -> ScoredBlock:
        """Compute log-probs under policy, reference and teacher, and advantages.

        ``logp_old`` comes from the engine where that is bitwise identical to the policy. Else it comes from a scoring
        pass in the rows of the first epoch, so that the first ratio is 1, or, for the block's first step, from the
        training pass, where there is one epoch and nothing reads it before (``scores_in_training``).

        Args:
            packed: with at least one token.
            sampled: scores by a bitwise identical engine; or None.
            rescore: make the scoring pass of the policy over everything, for a bitwise check.
        """
        nonzero_advantage = self._nonzero_advantage(packed, groups)
        plan = self._rows.steps(packed, 0, nonzero_advantage)
        old = None if rescore else sampled
        itself = not rescore and old is None and scores_in_training(self.recipe, self.algorithm)
        trained = micro_batches_of(plan, self.ranks)
        left_out = [s for step in plan for s in step.zero_advantage]
        rows = self._rows.packing(packed).rows(left_out, packed.packed.inputs)
        left_out_rows = self.ranks.rows_of(rows + ((),) * (-len(rows) % self.ranks.data_world))
        if old is None:
            more = {"sum_squares": True} if self.algorithm.reads_squares else {}
            scored = micro_batches_of(plan[1:], self.ranks) if itself else trained
            old = self._scores(self.policy, packed, [*scored, *left_out_rows], **more)
        logp_ref = None if self.reference is None else self._scores(self.reference, packed, trained).logp
        found = advantages(
            packed,
            groups,
            self.algorithm.advantage,
            weights=self.reward_weights,
            kl_beta=self.controllers.beta_in_reward,
            old=old,
            logp_ref=logp_ref,
            state=self.advantage_state,
        )
        advantage, logp_teacher = self._taught(found.advantage, packed, trained)
        return ScoredBlock(
            **vars(packed),
            logp_old=old.logp,
            entropy_old=old.entropy,
            logp_ref=logp_ref,
            value_old=old.value,
            nonzero_advantage=nonzero_advantage,
            scores_itself=itself,
            logp_teacher=logp_teacher,
            advantage=advantage,
            value_target=found.value_target,
            advantage_state=found.state,
        )

    def _taught(
        self, advantage: Tensor, packed: PackedBlock, rows: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor | None]:
        """The advantages with what a teacher adds to them, and its log-probs; None if it adds nothing."""
        distillation = self.algorithm.distillation
        if distillation is not None and distillation.alone:
            advantage = torch.zeros_like(advantage)
        if self.teacher is None or distillation is None or not self.algorithm.teacher_in_advantage:
            return advantage, None
        with self.teacher.on_device():
            logp = self._scores(self.teacher, packed, rows).logp
        added = teacher_advantage(logp, packed.packed.logp_sampler, distillation.advantage)
        if packed.packed.teacher is not None:
            added = added.masked_fill(packed.packed.teacher < 0, 0.0)
        if distillation.gamma:
            added = added * prefix_weight(added, packed.packed.sequence, distillation.gamma)
        return advantage + added, logp

    def _scores(self, scorer: Scorer, packed: PackedBlock, rows: Sequence[Sequence[int]], **more: bool) -> TokenScores:
        """A scoring pass over these rows of this rank."""
        return scores_of(
            scorer,
            packed.packed,
            rows,
            temperature=self.recipe.rollout.sampling.temperature,
            backend=self.recipe.train.scoring_backend,
            ranks=self.ranks,
            **more,
        )

    def _nonzero_advantage(self, packed: PackedBlock, groups: Sequence[Group]) -> tuple[bool, ...] | None:
        """One flag a sequence: whether it can change a gradient; None if no sequence may be left out.

        The advantages of such an algorithm need rewards alone, no scores.
        """
        if not (self.recipe.train.skip_zero_advantage and self.algorithm.silent_without_advantage):
            return None
        if self.router_coefficient:  # every token has a gradient
            return None
        if self.recipe.parallel.deterministic:  # metrics of left-out sequences are summed in an order of the ranks
            return None
        found = advantages(
            packed, groups, self.algorithm.advantage, weights=self.reward_weights, state=self.advantage_state
        )
        sequence = packed.packed.sequence
        signal = torch.zeros(packed.packed.num_sequences, dtype=torch.bool)
        signal[sequence[found.advantage != 0]] = True
        dropped = self._dropped(packed)
        return tuple(has and not left_out for has, left_out in zip(signal.tolist(), dropped, strict=True))

    def _dropped(self, block: PackedBlock) -> tuple[bool, ...]:
        """One flag a sequence: True for completions whose tokens have weight 0."""
        return tuple(truncated and self.algorithm.drop_truncated for truncated in block.truncated)

    def begin(self, block: ScoredBlock) -> None:
        """Begin to train on a block: plan its steps, drop completions, and choose tokens once for the whole block."""
        objective = self.algorithm.objective
        if block.advantage_state is not None:
            self.advantage_state = block.advantage_state
        dropped = self._dropped(block)
        tokens = block.tokens(trained=~torch.tensor(dropped))
        seed = derived_seed(self.recipe.seed, "selection", self.progress.block)
        statistics = objective.block_statistics(tokens, generator=torch.Generator().manual_seed(seed))
        self._current = _InTraining(
            block,
            tokens if statistics is None else statistics.attach(tokens),
            statistics,
            dropped,
            self._rows.epochs(block),
            self._rows.packing(block),
        )

    @property
    def in_training(self) -> bool:
        """Whether there is a block with steps left."""
        return self._current is not None

    @property
    def _now(self) -> _InTraining:
        if self._current is None:
            raise ValueError("no block in training: call begin first")
        return self._current

    # --- training on it

    def step(self) -> Numbers:
        """Take the next optimizer step of the block in training; returns its metrics."""
        begun = self._now
        if self._is_first_step:
            self._is_first_step = False
            compile_training_kernels(
                self.policy,
                backend=self.recipe.train.training_backend,
                temperature=self.recipe.rollout.sampling.temperature,
                entropy_gradient=self.algorithm.objective.entropy_bonus is not None,
            )
        progress, self.halved = self.progress, None
        is_first = progress.epoch == progress.step_in_epoch == 0
        # They are read again by later steps of this block, or by blocks that they sample ahead.
        is_read = self.recipe.rollout.staleness > 0 or sum(map(len, begun.plans)) > 1
        if self.sampler_weights is not None and is_first and is_read:
            self.sampler_weights.hold(self.version)
        place: Numbers = {"block": progress.block + 1, "epoch": progress.epoch + 1}
        while (record := self._attempt()) is None:
            self._halve()
        now = self._now
        progress.step_in_epoch += 1
        if progress.step_in_epoch == len(now.plans[progress.epoch]):
            self.controllers.end_epoch(now.block.packed.num_sequences)
            progress.epoch, progress.step_in_epoch = progress.epoch + 1, 0
        if progress.epoch == len(now.plans):
            self.end_block()
        return {"step": progress.step, **place, **record}

    def _attempt(self) -> Numbers | None:
        """Take a step; returns its metrics, or None if memory was short, in which case only gradients have changed."""
        now = self._now
        packing = self._rows.packing(now.block)
        if now.packing != packing:  # halved since the block began, or in a resumed run
            now = self._current = replace(now, plans=self._rows.epochs(now.block), packing=packing)
        plan = now.plans[self.progress.epoch]
        step = plan[self.progress.step_in_epoch]
        places = self._rows.places(len(step.micro_batches))
        own = [place for place in places if place is not None]
        whole = OptimizerStep(
            now.block.packed,
            now.tokens,
            step,
            self.algorithm.objective,
            self.algorithm.weighting,
            now.dropped,
            num_steps=len(plan),
            statistics=now.statistics,
        )
        mine = whole.micro_batches(own, scores_itself=self._scores_itself(now.block))
        record = self._optimize(whole, dict(zip(own, mine, strict=True)), places)
        if record is not None:
            record |= saved_by_packing(step, now.block.packed.inputs, now.packing)
            record["optimizer/sequences"] += len(step.zero_advantage)
            record["optimizer/tokens_per_micro_batch"] = now.packing.tokens_per_row
            record["optimizer/halvings"] = sum(done < self.progress.step for done in self.progress.halvings)
        return record

    def _halve(self) -> None:
        """Free the gradients, and halve micro-batches from this step on.

        Raises:
            TrainingError: a row of one sequence is too large.
        """
        for parameter in self.policy.named_parameters().values():
            parameter.grad = None
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()
        before = self._now.packing.tokens_per_row
        self.progress.halvings.append(self.progress.step)
        after = self._rows.packing(self._now.block).tokens_per_row
        if after == before:
            raise TrainingError(
                needed="memory for the longest sequence in a row of its own",
                given=f"too little for its {before} tokens",
                remedy="Set model.gradient_checkpointing or train.activation_memory, lower train.head_memory_budget or "
                "rollout.sampling.max_new_tokens, or use LoRA.",
            )
        self.halved = (
            f"memory was short in step {self.progress.step + 1}: repeated with micro-batches of {after:,} tokens "
            f"instead of {before:,}, as all steps from here on (train.tokens_per_micro_batch)"
        )

    def end_block(self) -> None:
        """Go on to the next block; also for a block without a signal, which has no steps."""
        self.progress.block, self.progress.epoch, self._current = self.progress.block + 1, 0, None

    def _optimize(
        self, whole: OptimizerStep, mine: Mapping[int, MicroBatch], places: Sequence[int | None]
    ) -> Numbers | None:
        recipe, progress, ranks, step = self.recipe, self.progress, self.ranks, whole.plan
        self.policy.release()  # weights that were gathered for sampling
        try:
            outputs = self._gradients(mine, places)
        except torch.OutOfMemoryError:
            if ranks.world > 1:  # a retry needs all ranks, and the others have gone on
                raise
            return None
        rate = learning_rate(progress.step, progress.block / recipe.train.blocks, recipe.train.optimizer)
        numbers: dict[str, Tensor] = {}

        def diagnose() -> None:
            left_out = whole.zero_advantage_output(self.policy.device, ranks)
            numbers.update(step_numbers(outputs if left_out is None else [*outputs, left_out], ranks))
            routing, coefficient = [sums for each in outputs for sums in each.routing], self.router_coefficient
            numbers.update(routing_numbers(routing, self.policy, coefficient=coefficient, ranks=ranks))
            if coefficient:
                numbers["loss/total"] = numbers["loss/total"] + coefficient * numbers["loss/router"]

        norm, taken = take_step(
            self.optimizer,
            rate=rate,
            max_grad_norm=recipe.train.max_grad_norm,
            ranks=ranks,
            as_several=recipe.parallel.deterministic,
            meanwhile=diagnose,
        )
        progress.step += 1
        progress.skipped += not taken
        progress.skipped_in_a_row = 0 if taken else progress.skipped_in_a_row + 1
        tokens = ranks.gather(torch.tensor([sum(b.tokens.num_tokens for b in mine.values())]))
        self.by_rank = {"parallel/tokens_per_rank": tokens.tolist()} if ranks.world > 1 else {}
        read = [s for row in step.micro_batches for s in row]
        self.parity = self._parity_of_step(outputs, [step.micro_batches[place] for place in mine])
        record = (
            on_host(numbers)
            | (self.parity or {})
            | {
                "optimizer/grad_norm": float(norm),
                "optimizer/learning_rate": rate,
                "optimizer/sequences": len(read),
                "optimizer/micro_batches": sum(bool(row) for row in step.micro_batches),
                "optimizer/skipped_steps": progress.skipped,
            }
        )
        self.controllers.after_step(record, whole.tokens, read, taken=taken)
        return record

    def _scores_itself(self, block: ScoredBlock) -> bool:
        """Whether the next step's training pass gives its ``logp_old``."""
        return block.scores_itself and self.progress.step_in_epoch == 0

    def _parity_of_step(self, outputs: Sequence[MicroBatchOutput], rows: Sequence[Sequence[int]]) -> Numbers | None:
        """Metrics of the parity gate, for a step whose training pass gives ``logp_old``; None for any other."""
        block = self._now.block
        if not self._scores_itself(block) or self.recipe.rollout.sampling.filters_distribution:
            return None
        found = [required(each.logp_old, "logp_old").float().cpu() for each in outputs]
        # Under parallel.deterministic a rank may have no micro-batch.
        own = torch.cat([torch.empty(0), *found])
        places = torch.cat([torch.empty(0, dtype=torch.long), *map(block.packed.tokens_of, rows)])
        logp = block.logp_old.clone()  # has the log-probs of later steps and of zero-advantage sequences
        logp[self.ranks.gather(places)] = self.ranks.gather(own)
        return parity_metrics(block.packed, logp)

    def _gradients(self, mine: Mapping[int, MicroBatch], places: Sequence[int | None]) -> list[MicroBatchOutput]:
        """Forward and backward of this rank's micro-batches; gradients are summed over all ranks."""
        ranks, router_loss = self.ranks, None
        if self.router_coefficient:
            router_loss = RouterLoss(self.policy, self.router_coefficient, ranks)
            counted = list(mine.values())
            router_loss.count(each.packed for each in (counted if self.recipe.parallel.deterministic else counted[1:]))
        if self.recipe.parallel.deterministic:
            if router_loss is not None:  # a rank may have no micro-batch
                router_loss.settle()
            return self._summed_in_order(mine, places, router_loss)
        labels = [ranks.data_rank] if ranks.data_rank else []
        outputs = self._backward(list(mine.values()), ranks.gather, router_loss, *labels)
        if ranks.world > 1:  # not otherwise: collecting the parameters takes a millisecond
            ranks.sum_gradients(self.policy.named_parameters().values())
        return outputs

    def _backward(
        self, micro_batches: Sequence[MicroBatch], gather: GatherOverRanks, router_loss: RouterLoss | None, *labels: int
    ) -> list[MicroBatchOutput]:
        recipe, distillation, now = self.recipe, self.algorithm.distillation, self._now
        teacher = None if distillation is None or not distillation.weight else self.teacher
        seed = derived_seed(recipe.seed, "dropout", self.progress.step, *labels)
        how: Any = {"temperature": recipe.rollout.sampling.temperature, "backend": recipe.train.training_backend}
        centering = None
        if self.sampler_weights is not None:
            since = self.version - now.block.version
            centering = partial(self.sampler_weights.centering, version=self.version, since=since, **how)
        with (
            seeded(seed, self.policy.device) if has_dropout(recipe) else nullcontext(),
            nullcontext() if teacher is None else teacher.on_device(),
            nullcontext() if self.sampler_weights is None else self.sampler_weights.in_use(),
        ):
            return backward(
                self.policy,
                self.algorithm.objective,
                micro_batches,
                **how,
                beta=self.controllers.beta_in_loss,
                entropy_coefficient=self.controllers.entropy_coefficient,
                statistics=now.statistics,
                seed=derived_seed(recipe.seed, "step", self.progress.step, *labels),
                value_loss=self.algorithm.value_loss,
                observations=self.algorithm.observations,
                gather=gather,
                router_loss=router_loss,
                teacher=teacher,
                distillation=distillation,
                centering=centering,
            )

    def _summed_in_order(
        self, mine: Mapping[int, MicroBatch], places: Sequence[int | None], router_loss: RouterLoss | None
    ) -> list[MicroBatchOutput]:
        """Forward and backward of this rank's micro-batches; gradients are summed along the tree of all ranks.

        Tokens that are chosen in a micro-batch are chosen without other ranks (``one_rank``): which micro-batches run
        at the same time depends on the number of ranks.
        """
        parameters = [p for p in self.policy.named_parameters().values() if p.requires_grad]
        outputs, total = list[MicroBatchOutput](), TreeSum()
        for place in places:
            if place is not None:
                outputs += self._backward([mine[place]], one_rank, router_loss, place)
            total.add([p.grad for p in parameters])
            for p in parameters:
                p.grad = None
        for p, gradient in zip(parameters, total.whole(), strict=True):
            p.grad = gradient
        self.ranks.sum_gradients_in_order(parameters)
        return outputs

    def check_skipped(self) -> str | None:
        """A message if the last step was skipped; else None.

        Raises:
            TrainingError: too many were skipped in a row.
        """
        progress = self.progress
        if progress.skipped_in_a_row >= self.recipe.train.max_skipped_in_a_row:
            raise TrainingError(
                needed="finite gradients",
                given=f"{progress.skipped_in_a_row} steps in a row without (train.max_skipped_in_a_row)",
                remedy="Lower the learning rate, or go on from the last checkpoint with --resume.",
            )
        return f"step {progress.step} skipped: its gradient is not finite" if progress.skipped_in_a_row else None

    # --- weights and state

    @property
    def version(self) -> int:
        """Version of the weights: optimizer steps done."""
        return self.progress.step

    def weights(self) -> Weights:
        """The current weights, for engines."""
        return self.policy.weights()

    def tensors(self) -> dict[str, Tensor]:
        """Trained weights, optimizer state, weights of earlier versions and the block in training, by name; not copied.

        Raises:
            TrainingError: an earlier step failed in the middle of its update.
        """
        if isinstance(self.optimizer, MasterAdamW):
            self.optimizer.check_whole()
        parameters = self.policy.held()
        tensors = {**parameter_tensors(parameters), **optimizer_tensors(parameters, self.optimizer)}
        if self.sampler_weights is not None:
            tensors |= self.sampler_weights.tensors()
        return tensors if self._current is None else tensors | stored_block(self._current.block)[0]

    def state_dict(self) -> dict[str, Any]:
        """The rest of the state, as JSON."""
        block = None if self._current is None else stored_block(self._current.block)[1]
        return {
            "progress": asdict(self.progress),
            "controllers": self.controllers.state_dict(),
            "advantage": dict(self.advantage_state),
            "block": block,
        }

    def load_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Continue from ``tensors`` and ``state_dict``; tensors are read one at a time."""
        self.progress = Progress(**state["progress"])
        self.controllers.load_state_dict(state["controllers"])
        self.advantage_state = state.get("advantage", {})  # a checkpoint of an earlier version has none
        parameters = self.policy.held()
        restore_parameters(parameters, tensors)
        self.policy.round_master_weights()
        restore_optimizer(parameters, self.optimizer, tensors)
        if self.sampler_weights is not None:
            self.sampler_weights.load(tensors)
        if state["block"] is not None:
            self.begin(load_block(tensors, state["block"]))


def scores_in_training(recipe: Recipe, algorithm: Algorithm) -> bool:
    """Whether ``logp_old`` of a block's first step comes from its training pass: nothing reads it before or again."""
    return (
        recipe.train.reuse_logp
        and not has_dropout(recipe)
        and recipe.train.epochs_per_block == 1
        and not algorithm.reads_scores
        and not algorithm.kl_in_reward
        and not algorithm.objective.reads_scoring_pass
    )


def has_dropout(recipe: Recipe) -> bool:
    """Whether training passes compute another function than scoring passes, because adapters have dropout."""
    lora = recipe.model.lora
    return lora is not None and lora.dropout > 0
