"""The section ``parallel``: several processes."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from logitless.train.recipe.rule import Processes, Rule, Setting, chosen, given, recipe_of
from logitless.train.recipe.section import Section

if TYPE_CHECKING:
    from logitless.train.recipe.config import Recipe


class ParallelSection(Section):
    """Several processes, started by torchrun; one process alone needs none of it (docs/scale.md)."""

    sampling: NonNegativeInt | Literal["auto"] = Field(
        0,
        description="processes that sample beside those that train; 0: all do both in turns; auto: half with "
        "rollout.staleness, else 0",
    )
    shard: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="processes over which one copy of the weights is sharded (FSDP2); auto: 1 under sampling and "
        "deterministic, and on GPUs that hold a copy each and can sample with it; else all that replicate and sequence "
        "leave",
    )
    replicate: PositiveInt = Field(1, description="copies of the weights")
    sampling_shards: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="processes that share the weights they sample with, gathered by layer; auto: where `shard` cuts "
        "weights on GPUs and rollout.engine is auto, 1 (a whole copy each) if it fits, else all",
    )
    sequence: PositiveInt = Field(
        1, description="processes that share each sequence (Ulysses); weights are sharded over them too"
    )
    vocabulary: Literal["auto", "own_rows", "all_rows"] = Field(
        "auto",
        description="where the LM head is sharded. own_rows: each process scores its own tokens, shards travel; "
        "all_rows: each scores all tokens against its shard; auto: where fewer bytes travel",
    )
    reference: Literal["device", "host"] = Field("device", description="where the reference's shards wait")
    deterministic: bool = Field(
        False,
        description="sum gradients along one tree, bitwise the same on 1, 2, 4, ... processes; every process then "
        "holds all weights",
    )
    timeout_seconds: PositiveInt = Field(
        1800,
        description="that processes wait for each other; longer than the longest rollout, and than reading the model",
    )

    @property
    def num_sampling(self) -> int:
        """Processes that only sample; 0 for an ``auto`` that is not resolved."""
        return 0 if self.sampling == "auto" else self.sampling

    @property
    def has_copy(self) -> bool:
        """Whether processes that train sample with a copy; False for an ``auto`` that is not resolved."""
        return self.sampling_shards != "auto" and not self.num_sampling

    @property
    def shards_of_sampling(self) -> int:
        """Processes that share a copy among those that only sample."""
        return self.sampling_shards if self.num_sampling and self.sampling_shards != "auto" else 1


# --- rules ----------------------------------------------------------------------------------------------------------


def _num_that_sample(processes: Processes) -> int:
    return processes.recipe.parallel.num_sampling or processes.world


deterministic = given("parallel.deterministic")
all_rows = chosen("parallel.vocabulary", "all_rows")
shards = Setting["Recipe"]("parallel.sampling_shards", lambda recipe: recipe.parallel.sampling_shards != "auto")
sampling = given("parallel.num_sampling", "parallel.sampling")

RULES: tuple[Rule["Recipe"], ...] = (
    sampling.needs(
        "rollout.engine gpu, transformers or auto",
        holds=lambda recipe: recipe.rollout.engine.samples_policy,
        given=lambda recipe: f"rollout.engine: {recipe.rollout.engine.name}",
        remedy="Leave rollout.engine or parallel.sampling out.",
    ),
    shards.excludes("rollout.in_flight", ", for weights come at one step of all"),
    shards.excludes("model.quantize"),
    shards.needs(
        "rollout.engine gpu, or auto without parallel.sampling",
        holds=lambda recipe: (
            recipe.rollout.engine.bitwise
            or (recipe.rollout.engine.choices is not None and recipe.parallel.sampling == 0)
        ),
        given=lambda recipe: f"rollout.engine: {recipe.rollout.engine.name}",
        remedy="Leave one of them out.",
    ),
    deterministic.needs(
        "all weights on every process",
        holds=lambda recipe: recipe.parallel.shard in ("auto", 1) and recipe.parallel.sequence == 1,
        given=lambda recipe: f"parallel.shard={recipe.parallel.shard}, parallel.sequence={recipe.parallel.sequence}",
        remedy="Leave both out.",
    ),
)

PROCESS_RULES: tuple[Rule[Processes], ...] = (
    sampling.on(recipe_of).needs(
        "a further process to train",
        holds=lambda processes: processes.world > 0,
        given=lambda processes: f"{processes.world + processes.recipe.parallel.num_sampling} in all",
        remedy="Start more processes (torchrun --nproc-per-node), or lower parallel.sampling (0: they do both).",
    ),
    sampling.on(recipe_of).needs(
        "training on whole weights, or on one sharded copy",
        holds=lambda processes: (
            not processes.arrangement.is_sharded or processes.arrangement.shard == processes.arrangement.world
        ),
        given=lambda processes: processes.arrangement.words,
        remedy="Leave parallel.replicate and parallel.sequence out.",
    ),
    shards.on(recipe_of).needs(
        "parallel.sampling, or weights that parallel.shard cuts",
        holds=lambda processes: processes.arrangement.is_sharded or processes.recipe.parallel.num_sampling > 0,
        given=lambda processes: processes.arrangement.words,
        remedy="Leave it out, or set parallel.shard.",
    ),
    shards.on(recipe_of).needs(
        "a divisor of the processes that sample",
        holds=lambda processes: _num_that_sample(processes) % int(processes.recipe.parallel.sampling_shards) == 0,
        given=lambda processes: f"{processes.recipe.parallel.sampling_shards} of {_num_that_sample(processes)}",
        remedy="Leave it at auto, or set it to the number of processes.",
    ),
    deterministic.on(recipe_of).needs(
        "1, 2, 4, 8, ... processes, for it sums along a binary tree",
        holds=lambda processes: processes.arrangement.world.bit_count() == 1,
        given=lambda processes: str(processes.arrangement.world),
        remedy="Start another number of processes, or leave it out.",
    ),
    Setting[Processes]("parallel.sequence", lambda processes: processes.arrangement.sequence > 1).needs(
        "model.attention: packed, which splits sequences over processes",
        holds=lambda processes: processes.recipe.model.attention == "packed",
        given=lambda processes: f"model.attention: {processes.recipe.model.attention}",
        remedy="Leave model.attention out.",
    ),
    all_rows.on(recipe_of).needs(
        "one copy of the weights",
        holds=lambda processes: processes.arrangement.replicate == 1,
        given=lambda processes: f"parallel.replicate={processes.arrangement.replicate}",
        remedy="Set parallel.vocabulary: own_rows, or leave it at auto.",
    ),
)
