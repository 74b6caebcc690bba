"""What is checked when recipe, data and model are all known, and before a run has drawn its first token.

What a part can check alone it checks itself, when it is made; here is what only two of them together can get wrong.
``--dry-run`` checks the same.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from logitless.distributed.arrangement import Arrangement
from logitless.errors import ConfigurationError, DataError
from logitless.models.lm_head import causal_lm
from logitless.rollout.recorded import read_completions
from logitless.rollout.sampling import SamplingOptions
from logitless.train.config import GpuEngineSection, Recipe, RecordedEngineSection
from logitless.train.eight_bit import check_torchao
from logitless.train.setup import Data
from logitless.types import Completion


def check_before_start(recipe: Recipe, data: Data, model: nn.Module) -> None:
    """Everything below.

    Args:
        recipe: checked.
        data: of the recipe.
        model: of the recipe, on any device, ``meta`` included.

    Raises:
        ConfigurationError, DataError: see below.
    """
    check_positions(recipe, data, model)
    check_moments(recipe, model)
    engine = recipe.rollout.engine
    if isinstance(engine, RecordedEngineSection) and not Path(engine.path).is_dir():
        vocabulary = causal_lm(model).get_input_embeddings().weight.shape[0]
        check_recorded(recipe, data, read_completions(engine.path), vocabulary)


def check_moments(recipe: Recipe, model: nn.Module) -> None:
    """Refuse moments that this machine cannot hold as asked; on the meta device a GPU elsewhere is planned for.

    Raises:
        UnavailableError: of 8 bits, without torchao.
        ConfigurationError: on the host, without a GPU that computes with them.
    """
    moments = recipe.train.optimizer.moments
    if moments == "8bit":
        check_torchao()
    kind = next(model.parameters()).device.type
    if kind == "meta":
        kind = "cuda" if recipe.model.device == "auto" else recipe.model.device.split(":")[0]
    if moments == "host" and kind != "cuda":
        raise ConfigurationError(
            needed="a GPU beside train.optimizer.moments: host",
            given=f"model.device {kind}",
            remedy="Leave moments at float32.",
        )


def arrangement_of(recipe: Recipe, world: int) -> Arrangement:
    """How the recipe's ``parallel`` arranges so many processes, checked.

    Raises:
        ConfigurationError: a number of processes that does not fit, or an engine or layers that need what these
            processes do not have.
    """
    parallel = recipe.parallel
    arrangement = Arrangement.of(
        world,
        replicate=parallel.replicate,
        shard=parallel.shard,
        sequence=parallel.sequence,
        whole=parallel.deterministic,
    )
    if recipe.parallel.deterministic and world & (world - 1):
        raise ConfigurationError(
            needed="1, 2, 4, 8, ... processes for parallel.deterministic, which sums along a binary tree",
            given=str(world),
            remedy="Start another number of processes, or leave it out.",
        )
    moments = recipe.train.optimizer.moments
    if (moments == "8bit" and arrangement.is_sharded) or (moments == "host" and world > 1):
        raise ConfigurationError(
            needed="train.optimizer.moments: float32 on several processes"
            + (", or copies of all weights for 8bit" if moments == "8bit" else ""),
            given=f"{moments} on {world}",
            remedy="Leave moments out" + (", or set parallel.replicate." if moments == "8bit" else "."),
        )
    if arrangement.is_sharded and isinstance(recipe.rollout.engine, GpuEngineSection):
        raise ConfigurationError(
            needed="all weights on every process, at one place in memory, for rollout.engine gpu",
            given=f"weights sharded over {arrangement.weights}",
            remedy="Set parallel.replicate to the number of processes, or rollout.engine: {name: transformers}.",
        )
    if arrangement.is_sharded and recipe.model.layers == "row_invariant":
        raise ConfigurationError(
            needed="all weights on every process for model.layers: row_invariant",
            given=f"weights sharded over {arrangement.weights}",
            remedy="Set parallel.replicate to the number of processes, or leave model.layers at auto.",
        )
    if arrangement.is_sharded and recipe.model.quantize is not None:
        raise ConfigurationError(
            needed="all weights on every process beside model.quantize, whose four bits are not cut",
            given=f"weights sharded over {arrangement.weights}",
            remedy="Set parallel.replicate to the number of processes, or leave model.quantize out.",
        )
    if arrangement.sequence > 1 and recipe.model.attention != "packed":
        raise ConfigurationError(
            needed="model.attention: packed, which splits sequences over processes",
            given=f"{recipe.model.attention} beside parallel.sequence={arrangement.sequence}",
            remedy="Leave it out.",
        )
    return arrangement


def check_positions(recipe: Recipe, data: Data, model: nn.Module) -> None:
    """Refuse sequences that end beyond the positions that the model knows.

    Raises:
        ConfigurationError: the longest prompt and a completion of the greatest length do not fit.
    """
    config: Any = causal_lm(model).config.get_text_config()  # type: ignore[union-attr]
    limit = positions(config)
    if limit is None:
        return
    rollout, of_turn = recipe.rollout, "sampling.max_new_tokens"
    several = (rollout.longest_completion, "rollout.limits.max_tokens")

    def most_of(sampling: SamplingOptions | None, section: str) -> tuple[int, str]:
        of_one = ((sampling or rollout.sampling).max_new_tokens, f"{section}.{of_turn}")
        return several if rollout.environment else of_one

    judged = recipe.evaluation
    for prompts, (most, key) in (
        (data.train, most_of(rollout.sampling, "rollout")),
        (data.held_out, most_of(judged.sampling, "evaluation")),
        *(
            (data.held_out_sets[name], most_of(each.sampling, f"evaluation.sets.{name}"))
            for name, each in judged.sets.items()
        ),
    ):
        longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
        last = longest + most - 1  # the last token is drawn and not read
        if prompts and last > limit:
            raise ConfigurationError(
                needed=f"sequences of at most {limit} tokens, as many positions as the model knows",
                given=f"prompts of up to {longest} tokens and {key}={most}",
                remedy=f"Lower {key} to at most {max(0, limit - longest + 1)}, or data.max_prompt_tokens.",
            )


def positions(config: Any) -> int | None:
    """How many positions a model knows, those that a scaling of its rotary embedding adds included; None: no limit.

    Example:
        >>> from transformers import LlamaConfig
        >>> positions(LlamaConfig(max_position_embeddings=512))
        512
    """
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    rope = getattr(config, "rope_parameters", None)
    scaled = 0.0
    if isinstance(rope, dict) and isinstance(rope.get("factor"), int | float):
        scaled = rope["factor"] * (rope.get("original_max_position_embeddings") or limit)
    return max(limit, int(scaled))


def check_recorded(recipe: Recipe, data: Data, completions: Sequence[Completion], vocabulary: int) -> None:
    """Refuse a file of completions that the run would stop at.

    Args:
        recipe: names the file.
        data: every prompt must have enough completions.
        completions: of the file.
        vocabulary: token ids are below.

    Raises:
        DataError: a token id that the model does not have, or too few completions of a prompt.
    """
    path = getattr(recipe.rollout.engine, "path", "")
    count: dict[str, int] = {}
    for completion in completions:
        count[completion.prompt_id] = count.get(completion.prompt_id, 0) + 1
        wrong = next((token for token in completion.token_ids if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise DataError(
                needed=f"token ids from 0 to {vocabulary - 1}, as the model has them",
                given=f"{wrong} in a completion of prompt {completion.prompt_id!r} in {path}",
                remedy="Record with the model's own tokenizer.",
            )
    wanted = recipe.rollout.completions_per_prompt
    few = next((prompt.id for prompt in data.train if count.get(prompt.id, 0) < wanted), None)
    if few is not None:
        raise DataError(
            needed=f"{wanted} recorded completions of every prompt (rollout.completions_per_prompt)",
            given=f"{count.get(few, 0)} of prompt {few!r} in {path}",
            remedy="Record more, ask for fewer completions a prompt, or leave the prompt out.",
        )
