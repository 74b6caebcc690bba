"""The one place where an engine is opened: a recipe names it, a member of a union describes it."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from logitless.errors import UnavailableError
from logitless.rollout.engine import Engine, Weights
from logitless.rollout.recorded import RecordedEngine
from logitless.rollout.transformers import TransformersEngine
from logitless.train.config import GpuEngineSection, Recipe, RecordedEngineSection, TransformersEngineSection


@dataclass(frozen=True)
class Engines:
    """What samples in a run.

    Args:
        training: completions to train on.
        evaluation: completions of held-out prompts, always with the policy's weights; may be the same engine.
    """

    training: Engine
    evaluation: Engine

    @property
    def distinct(self) -> tuple[Engine, ...]:
        """Each engine once."""
        return (self.training,) if self.training is self.evaluation else (self.training, self.evaluation)

    @property
    def in_this_process(self) -> bool:
        """Whether one of them samples with the module that it is handed."""
        return any(not isinstance(engine, RecordedEngine) for engine in self.distinct)

    def load_all(self, weights: Weights, version: int) -> None:
        """Every engine samples with these weights from now on."""
        for engine in self.distinct:
            engine.load(weights, version)

    def close(self) -> None:
        """Give back what they hold."""
        for engine in self.distinct:
            engine.close()


def open_engines(recipe: Recipe, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Engines:
    """The engines of a recipe. A replayed file says nothing of the policy, so beside one the policy is evaluated here.

    Args:
        recipe: names the engine.
        model: that an engine in this process samples with, until it is given other weights.
        tokenizer: of the model.

    Raises:
        DataError: a file of completions that is absent or malformed.
        UnavailableError: a model that the engine cannot run.
    """
    autocast = None if recipe.model.autocast is None else getattr(torch, recipe.model.autocast)
    here = TransformersEngine(
        model,
        tokenizer,
        max_rows=recipe.rollout.max_rows,
        prefill_tokens=recipe.rollout.prefill_tokens,
        autocast=autocast,
    )
    match recipe.rollout.engine:
        case TransformersEngineSection():
            return Engines(here, here)
        case RecordedEngineSection(path=path):
            return Engines(RecordedEngine(Path(path)), here)
        case GpuEngineSection(memory=memory):
            gpu = _gpu_engine(recipe, model, tokenizer, memory)
            return Engines(gpu, gpu)


def _gpu_engine(recipe: Recipe, model: nn.Module, tokenizer: PreTrainedTokenizerBase, memory: int | None) -> Engine:
    try:
        from logitless.rollout.gpu import GpuEngine
    except ImportError as error:
        raise UnavailableError(
            needed="Triton, for rollout.engine gpu",
            given=str(error),
            remedy="Install logitless[triton], or sample with rollout.engine: {name: transformers}.",
        ) from error
    rollout = recipe.rollout
    return GpuEngine(model, tokenizer, max_rows=rollout.max_rows, prefill_tokens=rollout.prefill_tokens, memory=memory)
