"""The learner: the policy with everything that trains it. Blocks of judged groups in, weights out.

    score      once a block, before any step: scores and advantages
    begin      what is settled for the block before its first step
    step       one optimizer step: weights a token, micro-batches, gradients summed, clipped and applied, controllers
    weights    what engines sample with, and ``version``, by which they tell one from another

All randomness comes from the run's seed and the numbers in ``Progress``, so that a block goes on bitwise wherever it
was stopped.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from logitless.data.packing import Packing, StepPlan, plan_epoch
from logitless.data.shares import rows_by_rank
from logitless.distributed.ranks import Ranks
from logitless.distributed.tree import TreeSum, places_in_tree
from logitless.errors import TrainingError
from logitless.models.router import router_loss_coefficient
from logitless.models.seeded import seeded
from logitless.objective.algorithm import Algorithm
from logitless.objective.inputs import required
from logitless.objective.objective import BlockStatistics
from logitless.objective.over_ranks import GatherOverRanks, one_rank
from logitless.rollout.engine import Weights
from logitless.seeds import derived_seed
from logitless.train.block import PackedBlock, ScoredBlock, micro_batches_of
from logitless.train.learn.compile_ahead import compile_training_kernels
from logitless.train.learn.control import Controllers
from logitless.train.learn.parity_gate import parity_metrics
from logitless.train.learn.policy import Policy, Scorer
from logitless.train.learn.routing import RouterLoss, routing_numbers
from logitless.train.learn.savings import saved_by_packing
from logitless.train.learn.score import advantages, scores_of
from logitless.train.learn.step import (
    MicroBatch,
    MicroBatchOutput,
    backward,
    on_host,
    step_batch,
    step_numbers,
    zero_advantage_output,
)
from logitless.train.optim.master_weights import MasterAdamW
from logitless.train.optim.optimizer import adamw, learning_rate, take_step
from logitless.train.recipe.algorithm import value_head_section
from logitless.train.recipe.config import Recipe
from logitless.train.record.metrics import Numbers
from logitless.train.store import checkpoint as checkpoints
from logitless.train.store.stored_block import load_block, stored_block
from logitless.types import Group, TokenBatch, TokenScores


@dataclass
class Progress:
    """Where training stands.

    Args:
        block: blocks finished.
        epoch: epochs finished of the block in training.
        step_in_epoch: steps finished of that epoch.
        step: optimizer steps done, skipped ones included.
        skipped, skipped_in_a_row: steps without a finite gradient.
        halvings: steps (as ``step`` counts them) at which memory was short and ``tokens_per_micro_batch`` was halved.
    """

    block: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    halvings: list[int] = field(default_factory=list)

    def clear(self) -> None:
        """Be as before the first step."""
        vars(self).update(vars(Progress()))


@dataclass(frozen=True)
class _InTraining:
    """A block with what is settled before its first step.

    Args:
        block: as it was prepared.
        tokens: what the objective reads of it, the block's selection of tokens included.
        statistics: of the block, or None.
        dropped: one flag a sequence: completions whose tokens weigh 0.
        plans: the steps of each epoch.
        packing: of their rows.
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
        recipe: checked.
        algorithm: objective, advantage, weighting and value loss of the recipe.
        policy: trained in place.
        reference: scores under the frozen policy, or None without a KL.
        reward_weights: by name, for advantages that take the rewards apart.
        ranks: that train the policy together; everything that one rank has to know of the others goes through it.

    Attributes:
        tokens_per_rank: that each rank with sequences of its own trained on in the last step.
        halved: a message where the last step halved its micro-batches for want of memory.
        parity: sampler against trainer, where the last step compared them in its own pass; None where scoring did.
    """

    def __init__(
        self,
        recipe: Recipe,
        algorithm: Algorithm,
        policy: Policy,
        reference: Scorer | None,
        *,
        reward_weights: Mapping[str, float],
        ranks: Ranks = Ranks.alone(),
    ) -> None:
        self.ranks = ranks
        self.tokens_per_rank: tuple[int, ...] = ()
        self.halved: str | None = None
        self.parity: Numbers | None = None
        self.recipe, self.algorithm, self.policy, self.reference = recipe, algorithm, policy, reference
        self.reward_weights = reward_weights
        self.router_coefficient = router_loss_coefficient(policy.model, recipe.model.router.loss)
        self.optimizer = adamw(
            policy.model.parameters(),
            recipe.train.optimizer,
            policy.device,
            value_head=() if policy.value_head is None else policy.value_head.parameters(),
            value_head_factor=value_head_section(recipe).learning_rate_factor,
        )
        if recipe.train.cuda_graphs and not recipe.parallel.deterministic:  # which keeps the gradients of every row
            policy.graph_short_rows()
        self.controllers = Controllers(recipe.kl, algorithm)
        self.progress = Progress()
        self._current: _InTraining | None = None
        self._is_first_step = True

    def under(self, recipe: Recipe) -> "Learner":
        """A learner of the same weights, with the same optimizer and progress, that reads other settings.

        Args:
            recipe: with another ``train`` or ``rollout``; the optimizer stays as it is.
        """
        other = copy(self)
        other.recipe, other.policy = recipe, self.policy.under(recipe.train)
        return other

    # --- before training on a block

    def score(
        self,
        packed: PackedBlock,
        groups: Sequence[Group],
        sampled: TokenScores | None = None,
        *,
        rescore: bool = False,
    ) -> ScoredBlock:
        """The block under policy and reference, in the rows of the first epoch, so that its first ratio is 1; and what
        each token is worth.

        What the only step of a block reads itself is left to it, and what an engine said of the tokens is taken.

        Args:
            packed: has a token.
            groups: that were packed.
            sampled: scores by an engine that is bitwise identical to the policy, which need no pass of the policy.
            rescore: make the pass over everything all the same.
        """
        live = self._live(packed, groups)
        plan = self._plan(packed, 0, live)
        old = None if rescore else sampled
        itself = not rescore and old is None and self._may_score_itself(plan)
        trained = micro_batches_of(plan, self.ranks)
        dead_rows = self._packing(packed).rows([s for step in plan for s in step.dead], packed.packed.inputs)
        dead = self.ranks.rows_of(dead_rows + ((),) * (-len(dead_rows) % self.ranks.data_world))
        if old is None:
            old = self._scores(self.policy, packed, [*([] if itself else trained), *dead])
        logp_ref = None if self.reference is None else self._scores(self.reference, packed, trained).logp
        found = advantages(
            packed,
            groups,
            self.algorithm.advantage,
            weights=self.reward_weights,
            kl_beta=self.controllers.beta_in_reward,
            old=old,
            logp_ref=logp_ref,
        )
        return ScoredBlock(
            **vars(packed),
            logp_old=old.logp,
            entropy_old=old.entropy,
            logp_ref=logp_ref,
            value_old=old.value,
            live=live,
            scores_itself=itself,
            advantage=found.advantage,
            value_target=found.value_target,
        )

    def _scores(self, scorer: Scorer, packed: PackedBlock, rows: Sequence[Sequence[int]]) -> TokenScores:
        """What a scorer says of the block in these rows of this rank, without gradient."""
        return scores_of(
            scorer,
            packed.packed,
            rows,
            temperature=self.recipe.rollout.sampling.temperature,
            backend=self.recipe.train.scoring_backend,
            ranks=self.ranks,
        )

    @property
    def drops_out(self) -> bool:
        """Whether a training pass is of another function than a scoring pass."""
        lora = self.recipe.model.lora
        return lora is not None and lora.dropout > 0

    def _may_score_itself(self, plan: Sequence[StepPlan]) -> bool:
        """Whether the one step of a block may take ``logp_old`` from its own pass: nothing reads it before."""
        return (
            self.recipe.train.reuse_logp
            and not self.drops_out
            and self.recipe.train.epochs_per_block == len(plan) == 1
            and self.policy.value_head is None
            and not self.algorithm.kl_in_reward
            and not self.algorithm.objective.reads_scoring_pass
        )

    def _live(self, packed: PackedBlock, groups: Sequence[Group]) -> tuple[bool, ...] | None:
        """One flag a sequence: whether it can change a gradient; None where nobody is left out. An algorithm that can
        do without some sequences reads nothing but rewards for its advantages."""
        if not (self.recipe.train.skip_zero_advantage and self.algorithm.silent_without_advantage):
            return None
        if self.router_coefficient:  # every token has a gradient
            return None
        if self.recipe.parallel.deterministic:  # their numbers, too, would be added in an order that the ranks decide
            return None
        advantage = advantages(packed, groups, self.algorithm.advantage, weights=self.reward_weights).advantage
        sequence = packed.packed.sequence
        signal = torch.zeros(packed.packed.num_sequences, dtype=torch.bool)
        signal[sequence[advantage != 0]] = True
        dropped = self._dropped(packed)
        return tuple(has and not left_out for has, left_out in zip(signal.tolist(), dropped, strict=True))

    def _dropped(self, block: PackedBlock) -> tuple[bool, ...]:
        """One flag a sequence: completions whose tokens weigh 0."""
        return tuple(truncated and self.algorithm.drop_truncated for truncated in block.truncated)

    def _packing(self, block: PackedBlock) -> Packing:
        """How rows are filled at this step; a row has room for the longest sequence whatever was halved."""
        train, progress = self.recipe.train, self.progress
        halvings = sum(step <= progress.step for step in progress.halvings)
        limit = train.tokens_per_micro_batch >> halvings
        return Packing(
            max(limit, max(block.packed.inputs.lengths)) if halvings else limit,
            self.policy.shares_prompts,
            self.policy.hidden_size if train.pack_by_cost else None,
        )

    def begin(self, block: ScoredBlock) -> None:
        """Settle what no step may change: the plan of each epoch, dropped completions, statistics of the block."""
        objective = self.algorithm.objective
        dropped = self._dropped(block)
        tokens = block.tokens(trained=~torch.tensor(dropped))
        statistics = objective.block_statistics(tokens, generator=self._generator("selection", self.progress.block))
        self._current = _InTraining(
            block,
            tokens if statistics is None else statistics.attach(tokens),
            statistics,
            dropped,
            self._plans(block),
            self._packing(block),
        )

    def _plans(self, block: ScoredBlock) -> tuple[tuple[StepPlan, ...], ...]:
        """The steps of each epoch."""
        epochs = range(self.recipe.train.epochs_per_block)
        return tuple(tuple(self._plan(block, epoch, block.live)) for epoch in epochs)

    @property
    def in_training(self) -> bool:
        """Whether a block has begun and has steps left."""
        return self._current is not None

    # --- training on it

    def step(self) -> Numbers:
        """The next optimizer step of the block in training, and its numbers."""
        if self._current is None:
            raise ValueError("no block in training: call begin first")
        if self._is_first_step:
            self._is_first_step = False
            compile_training_kernels(
                self.policy,
                backend=self.recipe.train.training_backend,
                temperature=self.recipe.rollout.sampling.temperature,
                entropy_gradient=self.algorithm.objective.entropy_bonus is not None,
            )
        progress, self.halved = self.progress, None
        place: Numbers = {"block": progress.block + 1, "epoch": progress.epoch + 1}
        while (record := self._attempt(self._current)) is None:
            self._halve(self._current)
        now, plan = self._current, self._current.plans[progress.epoch]
        progress.step_in_epoch += 1
        if progress.step_in_epoch == len(plan):
            self.controllers.end_epoch(now.block.packed.num_sequences)
            progress.epoch, progress.step_in_epoch = progress.epoch + 1, 0
        if progress.epoch == len(now.plans):
            self.end_block()
        return {"step": progress.step, **place, **record}

    def _attempt(self, now: _InTraining) -> Numbers | None:
        """The numbers of a step, or None where memory was short and nothing has happened but to gradients."""
        if now.packing != self._packing(now.block):  # halved since the block began, or in the run that is repeated
            now = self._current = replace(now, plans=self._plans(now.block), packing=self._packing(now.block))
        plan = now.plans[self.progress.epoch]
        step = plan[self.progress.step_in_epoch]
        parts = (now.block.packed, now.tokens, step, self.algorithm.objective, self.algorithm.weighting)
        options: Any = {"dropped": now.dropped, "num_steps": len(plan), "statistics": now.statistics}
        places = self._places(len(step.micro_batches))
        own = [place for place in places if place is not None]
        mine = step_batch(*parts, **options, scores_itself=now.block.scores_itself, places=own)
        zero_advantage_numbers = partial(
            zero_advantage_output, *parts, **options, device=self.policy.device, ranks=self.ranks
        )
        record = self._optimize(dict(zip(own, mine, strict=True)), places, step, zero_advantage_numbers, now)
        if record is not None:
            record |= saved_by_packing(step, now.block.packed.inputs, now.packing)
            record["optimizer/sequences"] += len(step.dead)
            record["optimizer/tokens_per_micro_batch"] = now.packing.tokens_per_row
            record["optimizer/halvings"] = sum(done < self.progress.step for done in self.progress.halvings)
        return record

    def _halve(self, now: _InTraining) -> None:
        """Give the gradients back, and halve what is read at once from this step on.

        Raises:
            TrainingError: rows have a sequence each already.
        """
        for parameter in self.policy.named_parameters().values():
            parameter.grad = None
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()
        before = now.packing.tokens_per_row
        self.progress.halvings.append(self.progress.step)
        after = self._packing(now.block).tokens_per_row
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
        """Go on to the next block; for one without a signal, this is all there is to do."""
        self.progress.block, self.progress.epoch, self._current = self.progress.block + 1, 0, None

    def _places(self, num_rows: int) -> list[int | None]:
        """Of this rank's rows among those of a step, in the order in which it reads them; None: a rank that sums in
        order waits for others there."""
        if self.recipe.parallel.deterministic:
            return list(places_in_tree(num_rows, self.ranks.rank, self.ranks.world))
        return list(self.ranks.rows_of(range(num_rows)))

    def _optimize(
        self,
        mine: Mapping[int, MicroBatch],
        places: Sequence[int | None],
        step: StepPlan,
        zero_advantage_numbers: Callable[[], MicroBatchOutput | None],
        now: _InTraining,
    ) -> Numbers | None:
        recipe, progress, ranks = self.recipe, self.progress, self.ranks
        self.policy.release()  # whole weights were for sampling
        try:
            outputs = self._gradients(mine, places, now.statistics)
        except torch.OutOfMemoryError:
            if ranks.world > 1:  # the others wait for this one
                raise
            return None
        rate = learning_rate(progress.step, progress.block / recipe.train.blocks, recipe.train.optimizer)
        numbers: dict[str, Tensor] = {}

        def diagnose() -> None:
            dead = zero_advantage_numbers()
            numbers.update(step_numbers(outputs if dead is None else [*outputs, dead], ranks))
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
        self.tokens_per_rank = tuple(
            ranks.gather(torch.tensor([sum(b.tokens.num_tokens for b in mine.values())])).tolist()
        )
        read = [s for row in step.micro_batches for s in row]
        self.parity = self._parity_of_step(outputs, [step.micro_batches[place] for place in mine], now.block)
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
        self.controllers.after_step(record, now.tokens, read, taken=taken)
        return record

    def _parity_of_step(
        self, outputs: Sequence[MicroBatchOutput], rows: Sequence[Sequence[int]], block: ScoredBlock
    ) -> Numbers | None:
        """The gate's numbers of a block whose only step says ``logp_old`` itself; None for any other block.

        Args:
            outputs: of this rank's micro-batches.
            rows: the sequences of each.
        """
        if not block.scores_itself or self.recipe.rollout.sampling.filters_distribution:
            return None
        found = [required(each.logp_old, "logp_old").float().cpu() for each in outputs]
        # A rank that sums in order may have no micro-batch at all.
        own = torch.cat([torch.empty(0), *found])
        places = torch.cat([torch.empty(0, dtype=torch.long), *map(block.packed.tokens_of, rows)])
        logp = block.logp_old.clone()  # zero-advantage sequences were scored before
        logp[self.ranks.gather(places)] = self.ranks.gather(own)
        return parity_metrics(block.packed, logp)

    def _gradients(
        self, mine: Mapping[int, MicroBatch], places: Sequence[int | None], statistics: BlockStatistics | None
    ) -> list[MicroBatchOutput]:
        """What came of this rank's micro-batches, by their places; gradients are the sums over all ranks."""
        ranks, router_loss = self.ranks, None
        if self.router_coefficient:
            router_loss = RouterLoss(self.policy, self.router_coefficient, ranks)
            counted = list(mine.values())
            router_loss.count(each.packed for each in (counted if self.recipe.parallel.deterministic else counted[1:]))
        if self.recipe.parallel.deterministic:
            if router_loss is not None:  # a rank may have no micro-batch
                router_loss.settle()
            return self._summed_in_order(mine, places, statistics, router_loss)
        labels = [ranks.data_rank] if ranks.data_rank else []
        outputs = self._backward(list(mine.values()), statistics, ranks.gather, router_loss, *labels)
        if ranks.world > 1:  # looking through a model for its parameters takes the host a millisecond
            ranks.sum_gradients(self.policy.named_parameters().values())
        return outputs

    def _backward(
        self,
        micro_batches: Sequence[MicroBatch],
        statistics: BlockStatistics | None,
        gather: GatherOverRanks,
        router_loss: RouterLoss | None,
        *labels: int,
    ) -> list[MicroBatchOutput]:
        recipe = self.recipe
        seed = derived_seed(recipe.seed, "dropout", self.progress.step, *labels)
        with seeded(seed, self.policy.device) if self.drops_out else nullcontext():
            return backward(
                self.policy,
                self.algorithm.objective,
                micro_batches,
                temperature=recipe.rollout.sampling.temperature,
                backend=recipe.train.training_backend,
                beta=self.controllers.beta_in_loss,
                entropy_coefficient=self.controllers.entropy_coefficient,
                statistics=statistics,
                seed=derived_seed(recipe.seed, "step", self.progress.step, *labels),
                value_loss=self.algorithm.value_loss,
                gather=gather,
                router_loss=router_loss,
            )

    def _summed_in_order(
        self,
        mine: Mapping[int, MicroBatch],
        places: Sequence[int | None],
        statistics: BlockStatistics | None,
        router_loss: RouterLoss | None,
    ) -> list[MicroBatchOutput]:
        """What came of this rank's micro-batches; gradients are the sums along the tree of all ranks.

        What is chosen in a micro-batch is chosen in it alone, for which of them run side by side depends on the ranks.
        """
        parameters = [p for p in self.policy.named_parameters().values() if p.requires_grad]
        outputs, total = list[MicroBatchOutput](), TreeSum()
        for place in places:
            if place is not None:
                outputs += self._backward([mine[place]], statistics, one_rank, router_loss, place)
            total.add([p.grad for p in parameters])
            for p in parameters:
                p.grad = None
        for p, gradient in zip(parameters, total.whole(), strict=True):
            p.grad = gradient
        self.ranks.sum_gradients_in_order(parameters)
        return outputs

    def check_skipped(self) -> str | None:
        """A message where the last step was skipped.

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

    @property
    def by_rank(self) -> dict[str, tuple[int, ...]]:
        """Numbers of the last step that are a list, one a rank with sequences of its own; none on a single rank."""
        return {"parallel/tokens_per_rank": self.tokens_per_rank} if self.ranks.world > 1 else {}

    # --- what it hands out and goes on from

    @property
    def version(self) -> int:
        """Of the weights: optimizer steps that they have seen."""
        return self.progress.step

    def weights(self) -> Weights:
        """The weights as they are now."""
        return self.policy.weights()

    def tensors(self) -> dict[str, Tensor]:
        """What is trained, its optimizer state and the tokens of a block in training, by name; not copied.

        Raises:
            TrainingError: a step failed in the middle of its update, and whoever caught that goes on.
        """
        if isinstance(self.optimizer, MasterAdamW):
            self.optimizer.check_whole()
        parameters = self.policy.held()
        tensors = checkpoints.parameter_tensors(parameters) | checkpoints.optimizer_tensors(parameters, self.optimizer)
        return tensors if self._current is None else tensors | stored_block(self._current.block)[0]

    def state_dict(self) -> dict[str, Any]:
        """The rest of the state, as JSON."""
        block = None if self._current is None else stored_block(self._current.block)[1]
        return {"progress": asdict(self.progress), "controllers": self.controllers.state_dict(), "block": block}

    def load_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Go on from ``tensors`` and ``state_dict``; each tensor is read to where it belongs before the next."""
        self.progress = Progress(**state["progress"])
        self.controllers.load_state_dict(state["controllers"])
        parameters = self.policy.held()
        checkpoints.restore_parameters(parameters, tensors)
        self.policy.round_master_weights()
        checkpoints.restore_optimizer(parameters, self.optimizer, tensors)
        if state["block"] is not None:
            self.begin(load_block(tensors, state["block"]))

    def _plan(self, block: PackedBlock, epoch: int, live: Sequence[bool] | None) -> list[StepPlan]:
        """The optimizer steps of an epoch; completions that are all empty make none."""
        train = self.recipe.train
        steps = plan_epoch(
            block.groups,
            block.packed.inputs,
            tokens_per_step=train.tokens_per_step,
            packing=self._packing(block),
            live=live,
            seed=derived_seed(self.recipe.seed, "epoch", self.progress.block, epoch),
        )
        return [self._over_ranks(step, block) for step in steps if step.micro_batches]

    def _over_ranks(self, step: StepPlan, block: PackedBlock) -> StepPlan:
        """The step with the rows of all ranks, as ``Ranks.rows_of`` takes them apart; on one rank the step itself, and
        also where any number of ranks is to train on the same rows."""
        if self.recipe.parallel.deterministic:
            return replace(
                step, micro_batches=step.micro_batches + ((),) * (self.ranks.world - len(step.micro_batches))
            )
        rows = rows_by_rank(
            step,
            block.groups,
            block.packed.inputs,
            num_ranks=self.ranks.data_world,
            packing=self._packing(block),
        )
        return replace(step, micro_batches=tuple(row for of_ranks in zip(*rows, strict=True) for row in of_ranks))

    def _generator(self, *labels: str | int) -> torch.Generator:
        return torch.Generator().manual_seed(derived_seed(self.recipe.seed, *labels))
