"""The section ``train``: the loop, its optimizer, and what they need."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from logitless.train.recipe.rule import (
    Machine,
    Rule,
    Setting,
    chosen,
    given,
    needs_gpu,
    needs_one_process,
    needs_package,
    needs_whole_weights,
)
from logitless.train.recipe.section import Section
from logitless.types import LMHead

if TYPE_CHECKING:
    from logitless.train.recipe.config import Recipe


Backend = Literal["auto", "reference", "chunked", "fused"]


Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSection(Section):
    """AdamW."""

    learning_rate: PositiveFloat = Field(1e-6, description="peak")
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="decay rates, each in [0, 1)")
    eps: PositiveFloat = Field(1e-8, description="added to the denominator")
    weight_decay: float = Field(0.0, ge=0, description="decoupled; not on vectors")
    implementation: Literal["auto", "foreach", "fused", "loop"] = Field("auto", description="of torch.optim.AdamW")
    moments: Literal["float32", "8bit", "host"] = Field(
        "float32",
        description="AdamW's state. 8bit: 2 bytes a weight instead of 8, by torchao; host: in the host's memory, with "
        "the master weights (docs/performance.md)",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after warm-up, to 0 at the end")
    warmup_steps: NonNegativeInt = Field(0, description="optimizer steps of linear warm-up")


class TrainSection(Section):
    """The loop."""

    blocks: PositiveInt = Field(100, description="rollout batches")
    epochs_per_block: PositiveInt = Field(1, description="E, passes over a block")
    tokens_per_step: PositiveInt = Field(65536, description="scored tokens an optimizer step aims at")
    tokens_per_micro_batch: PositiveInt = Field(16384, description="most tokens read at once; memory and speed only")
    share_prompts: bool = Field(
        True,
        description="compute a prompt once for its completions, where attention can (not longrope, not transformers' "
        "masks)",
    )
    pack_by_cost: bool = Field(
        True, description="fill packed rows by the work they make, attention included; false: in order"
    )
    skip_zero_advantage: bool = Field(
        True,
        description="keep sequences with advantage or weight 0 out of forward and backward, where they cannot change "
        "a gradient (they can under a KL, entropy bonus, value, router or distillation loss)",
    )
    reuse_logp: bool = Field(
        True,
        description="take logp_old of a block's first step from its training pass, where the block is used once and "
        "nothing reads it before; not with model.lora.dropout",
    )
    drop_truncated: bool = Field(False, description="give no weight to tokens of completions cut at the limit")
    max_grad_norm: PositiveFloat | None = Field(
        1.0, description="global norm to clip at; a value head has a norm of its own"
    )
    max_skipped_in_a_row: PositiveInt = Field(5, description="non-finite steps in a row that stop the run")
    max_unscored_fraction: float = Field(
        0.25, ge=0, le=1, description="share of a block's completions that a reward may fail at (error, timeout)"
    )
    max_blocks_unscored: PositiveInt = Field(3, description="blocks in a row over that share that stop the run")
    max_blocks_without_signal: PositiveInt = Field(
        20, description="blocks in a row with nothing to train on that stop the run"
    )
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    training_backend: Backend = Field("auto", description="head backend with gradients")
    scoring_backend: Backend = Field("auto", description="head backend without")
    head_memory_budget: PositiveInt | None = Field(None, description="bytes of logits-like memory; None: chosen")
    activation_memory: PositiveInt | None = Field(
        None,
        description="bytes of activations of a micro-batch; layers are recomputed or kept on the host to fit "
        "(docs/performance.md); None: no limit",
    )
    cuda_graphs: bool = Field(
        True, description="train short rows of small models by CUDA graphs, in up to an eighth of the GPU's memory"
    )


# --- rules ----------------------------------------------------------------------------------------------------------


def _longest(recipe: "Recipe") -> int:
    """Tokens that the model reads of the longest prompt and completion; the last one is sampled and never read."""
    return recipe.data.max_prompt_tokens + recipe.rollout.longest_completion - 1


def _head_backend(which: Literal["training", "scoring"]) -> Rule[Machine]:
    """The rule that a head backend which is set by name runs on the machine."""
    key = f"train.{which}_backend"

    def named(machine: Machine) -> Any:
        return getattr(machine.recipe.train, f"{which}_backend")

    def reason(machine: Machine) -> str:
        from logitless.head.api import why_not  # imports torch._dynamo, which reading a recipe need not wait for

        head = LMHead(torch.zeros(8, 16, device=machine.device))
        return why_not(named(machine), torch.zeros(1, 16, device=machine.device), head) or ""

    return Setting[Machine](key, lambda machine: named(machine) != "auto").needs(
        "a backend that runs here",
        holds=lambda machine: not reason(machine),
        given=lambda machine: f"{named(machine)}, which cannot: {reason(machine)}",
        remedy=f"Leave {key} out.",
        instead=lambda _: (f"{key}=auto",),
    )


_MOMENTS = "train.optimizer.moments"

activation_memory = given("train.activation_memory")
host, eight_bit = chosen(_MOMENTS, "host"), chosen(_MOMENTS, "8bit")

RULES: tuple[Rule["Recipe"], ...] = (
    Setting["Recipe"]("train.tokens_per_micro_batch").needs(
        "room for one sequence of the longest prompt and completion",
        holds=lambda recipe: recipe.train.tokens_per_micro_batch >= _longest(recipe),
        given=lambda recipe: (
            f"{recipe.train.tokens_per_micro_batch}, and such a sequence has {_longest(recipe)} tokens"
        ),
        remedy="Raise it, or lower data.max_prompt_tokens or rollout.sampling.max_new_tokens (limits.max_tokens).",
    ),
    activation_memory.excludes("model.gradient_checkpointing", ", which saves them too"),
    activation_memory.excludes("model.compile"),
    chosen(_MOMENTS, "8bit", "host").keeps(
        "train.optimizer.implementation", "auto", ", for torch.optim.AdamW has no such moments"
    ),
    host.about(
        "model.trained_dtype",
        "model.trained_dtype: bfloat16, whose masters go to the host",
        lambda dtype: dtype != "float32",
        "Set it, or leave moments at float32.",
    ),
    host.excludes("parallel.deterministic", remedy="Leave it out, or leave moments at float32."),
)

PROCESS_RULES = (
    needs_whole_weights(eight_bit, "", "Leave moments out, or set parallel.replicate."),
    needs_one_process(host, "", "Leave moments out."),
)

MOMENT_RULES = (
    needs_package(eight_bit, "torchao", "torchao", "train.optimizer.moments=float32"),
    needs_gpu(host, "a GPU and Triton", "train.optimizer.moments=float32", kernels=True),
)
"""Checked before a run starts too, not by doctor alone."""

MACHINE_RULES = (*MOMENT_RULES, _head_backend("training"), _head_backend("scoring"))
