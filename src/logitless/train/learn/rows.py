"""The packed rows that a block is trained in: the steps of each epoch, the rows of each step, the rows of each rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from logitless.data.packing import Packing, StepPlan, plan_epoch, rows_by_rank
from logitless.distributed.ranks import Ranks
from logitless.distributed.tree import places_in_tree
from logitless.seeds import derived_seed
from logitless.train.block import PackedBlock, ScoredBlock
from logitless.train.learn.policy import Policy
from logitless.train.learn.progress import Progress
from logitless.train.recipe.config import Recipe


@dataclass(frozen=True)
class RowPlanner:
    """Plans the rows of the block at which training has arrived; every rank makes the same plan."""

    recipe: Recipe
    policy: Policy
    ranks: Ranks
    progress: Progress

    def packing(self, block: PackedBlock) -> Packing:
        """How rows are filled at this step, after halvings; the longest sequence always fits."""
        train, progress = self.recipe.train, self.progress
        halvings = sum(step <= progress.step for step in progress.halvings)
        limit = train.tokens_per_micro_batch >> halvings
        return Packing(
            max(limit, max(block.packed.inputs.lengths)) if halvings else limit,
            self.policy.shares_prompts,
            self.policy.hidden_size if train.pack_by_cost else None,
        )

    def epochs(self, block: ScoredBlock) -> tuple[tuple[StepPlan, ...], ...]:
        """The steps of each epoch."""
        epochs = range(self.recipe.train.epochs_per_block)
        return tuple(tuple(self.steps(block, epoch, block.nonzero_advantage)) for epoch in epochs)

    def steps(self, block: PackedBlock, epoch: int, nonzero_advantage: Sequence[bool] | None) -> list[StepPlan]:
        """The optimizer steps of an epoch; none if all completions are empty."""
        train = self.recipe.train
        steps = plan_epoch(
            block.groups,
            block.packed.inputs,
            tokens_per_step=train.tokens_per_step,
            packing=self.packing(block),
            nonzero_advantage=nonzero_advantage,
            seed=derived_seed(self.recipe.seed, "epoch", self.progress.block, epoch),
        )
        return [self._over_ranks(step, block) for step in steps if step.micro_batches]

    def places(self, num_rows: int) -> list[int | None]:
        """Indices of the step's rows that this rank reads, in order.

        Under ``parallel.deterministic`` None stands for a place in the tree of sums at which this rank has no row.
        """
        if self.recipe.parallel.deterministic:
            return list(places_in_tree(num_rows, self.ranks.rank, self.ranks.world))
        return list(self.ranks.rows_of(range(num_rows)))

    def _over_ranks(self, step: StepPlan, block: PackedBlock) -> StepPlan:
        """The step with its rows divided over the ranks, in the order that ``Ranks.rows_of`` expects.

        Under ``parallel.deterministic`` the rows are the same for any number of ranks, and empty ones fill them up.
        """
        if self.recipe.parallel.deterministic:
            missing = self.ranks.world - len(step.micro_batches)
            return replace(step, micro_batches=step.micro_batches + ((),) * missing)
        rows = rows_by_rank(
            step, block.groups, block.packed.inputs, num_ranks=self.ranks.data_world, packing=self.packing(block)
        )
        return replace(step, micro_batches=tuple(row for of_ranks in zip(*rows, strict=True) for row in of_ranks))
