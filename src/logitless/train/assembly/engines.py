"""The engines of a recipe."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from logitless.distributed.ranks import Ranks
from logitless.errors import InputError, TrainingError
from logitless.http_client import HttpClient, Patience, api_key
from logitless.own_code import blamed
from logitless.rollout.engine import Engine, ExactEngine, PushingEngine, SharedEngine, Weights
from logitless.rollout.in_flight import RepeatingEngine, in_flight_engine
from logitless.rollout.recorded import ColumnEngine, RecordedEngine
from logitless.rollout.sampling_ranks import SamplingRanks
from logitless.rollout.transformers import TransformersEngine
from logitless.rollout.turn_taking import TurnTaking
from logitless.rollout.vllm.api import VllmServer
from logitless.rollout.vllm.probe import Probe, probe_prompt
from logitless.rollout.vllm.server import VllmServerEngine
from logitless.rollout.vllm.weight_sync import AdapterSync, FolderSync, WeightSync
from logitless.train.assembly.model import copy_that_samples
from logitless.train.assembly.process import autocast_of, device_of
from logitless.train.collect.one_client import OneClientANode, ServerEngine
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.engine import (
    AdapterWeightsSection,
    AutoEngineSection,
    FolderWeightsSection,
    GpuEngineSection,
    ProbeSection,
    RecordedEngineSection,
    TransformersEngineSection,
    VllmServerEngineSection,
)
from logitless.train.recipe.rollout import RolloutSection
from logitless.train.record.metrics import Numbers

if TYPE_CHECKING:
    from logitless.rollout.gpu.sharded import ShardedGpuEngine


@dataclass(frozen=True)
class Engines:
    """The engines of a run.

    Args:
        training: samples completions to train on.
        evaluation: samples completions of held-out prompts, always with the policy's weights; may be the same engine.
    """

    training: Engine
    evaluation: Engine

    @property
    def distinct(self) -> tuple[Engine, ...]:
        """Each engine once."""
        return (self.training,) if self.training is self.evaluation else (self.training, self.evaluation)

    def load_all(self, weights: Weights, version: int) -> Numbers:
        """Give the weights to every engine; returns the transfer metrics of engines on servers."""
        numbers: Numbers = {}
        for engine in self.distinct:
            # Not an EngineError: on that all ranks save a checkpoint together, but here one may fail alone.
            what = f"an engine that takes weights in {type(engine).__name__}.load (rollout.engine)"
            with blamed(what, TrainingError, passing=torch.OutOfMemoryError):
                engine.load(weights, version)
            if isinstance(engine, PushingEngine):
                numbers |= engine.transfer_numbers
        return numbers

    def close(self) -> None:
        """Close every engine, also where one raises."""
        with ExitStack() as stack:
            for engine in self.distinct:
                stack.callback(engine.close)


def engines_on(
    ranks: Ranks, engines: Engines, recipe: Recipe, exchange: Ranks | None = None, *, repeats: bool = False
) -> Engines:
    """The engines that training uses: ranks that only sample, this rank's, or servers by one rank of each node.

    A collective. Held-out prompts are sampled here, while ranks that only sample go on.

    Args:
        ranks: that train.
        engines: opened by this rank.
        recipe: of the run.
        exchange: the first of ``ranks`` with those that only sample; None on all others.
        repeats: whether the run repeats one with in-flight updates.

    Raises:
        UnavailableError: weights would arrive in flight, for which the engine is not made.
    """
    if recipe.rollout.in_flight is not None:
        in_flight_engine(engines.training)
    if recipe.parallel.num_sampling:
        in_flight = recipe.rollout.in_flight is not None and not repeats
        like_training = isinstance(engines.training, ExactEngine)  # not where layers are sharded
        sampling = SamplingRanks(exchange, first=ranks.world, in_flight=in_flight, like_training=like_training)
        return replace(engines, training=sampling)
    if isinstance(engines.training, SharedEngine):
        group = sharing(ranks, range(ranks.world), int(recipe.parallel.sampling_shards))
        assert group is not None, "among all"
        engines.training.share(group)
        return engines
    if repeats:
        return replace(engines, training=repeating_engine(engines.training, recipe.rollout))
    if ranks.world == 1 or not isinstance(engines.training, ServerEngine):
        return engines
    shared = OneClientANode(engines.training, ranks)
    return Engines(shared, shared if engines.evaluation is engines.training else engines.evaluation)


def sharing(ranks: Ranks, sampling: range, size: int) -> Ranks | None:
    """The ranks that share weights with this one to sample, so many in a row; None for one that does not sample.

    A collective.

    Args:
        ranks: of the run.
        sampling: those that sample.
        size: divides their number.
    """
    if size == ranks.world:
        return ranks
    groups = [ranks.subset(sampling[first : first + size]) for first in range(0, len(sampling), size)]
    return next((group for group in groups if group is not None), None)


def repeating_engine(engine: Engine, options: RolloutSection) -> RepeatingEngine:
    """The engine as one that repeats in-flight updates."""
    return RepeatingEngine(engine, recompute=options.in_flight == "recompute", copies=options.staleness + 1)


def open_engines(recipe: Recipe, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Engines:
    """The engines of a recipe. If completions are replayed, held-out prompts are sampled in this process.

    Args:
        recipe: resolved.
        model: of the policy, for engines in this process.

    Raises:
        DataError: a file of completions is missing or malformed.
        UnavailableError: the engine cannot run the model.
    """
    here = engine_here(recipe, model, tokenizer)
    match recipe.rollout.engine:
        case TransformersEngineSection():
            return Engines(here, here)
        case RecordedEngineSection() as section:
            if section.recorded_run is not None:
                return Engines(here, here)  # the collector replays the log: nothing is sampled for training
            if section.recorded_file is not None:
                return Engines(RecordedEngine(section.recorded_file), here)
            assert section.column is not None
            return Engines(ColumnEngine(section.column, tokenizer), here)
        case AutoEngineSection():
            raise InputError(needed="a resolved recipe", given="rollout.engine: auto", remedy="Resolve it first.")
        case GpuEngineSection():
            gpu = _gpu_engine(recipe, model, tokenizer)
            return Engines(gpu, gpu)
        case VllmServerEngineSection() as section:
            servers = _vllm_servers(recipe, section, tokenizer)
            if recipe.rollout.staleness > 0 and not section.in_flight:
                servers = TurnTaking(servers)
            return Engines(servers, servers)


def engine_here(recipe: Recipe, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> TransformersEngine:
    """The engine ``transformers``, which samples any model in this process.

    Args:
        recipe: sets batch sizes and autocast.
    """
    return TransformersEngine(
        model,
        tokenizer,
        max_rows=recipe.rollout.max_rows,
        prefill_tokens=recipe.rollout.prefill_tokens,
        autocast=autocast_of(recipe.model),
    )


def servers_of(section: VllmServerEngineSection, *, seconds: float) -> list[VllmServer]:
    """The servers that a recipe names.

    Args:
        seconds: the most time of a request.

    Raises:
        ConfigurationError: something else than an address, or no key where one is named.
    """
    key = api_key(section.api_key_file, section.api_key_variable)
    return [VllmServer(HttpClient(url, api_key=key, seconds=seconds)) for url in section.urls]


def served_model(recipe: Recipe, section: VllmServerEngineSection) -> str:
    """The servers' name of the model."""
    return section.model or str(recipe.model.source)


def _vllm_servers(recipe: Recipe, section: VllmServerEngineSection, tokenizer: PreTrainedTokenizerBase) -> Engine:
    patience, served = Patience(give_up_seconds=section.give_up_seconds), served_model(recipe, section)
    match section.weights:
        case FolderWeightsSection() as folder:
            sync: WeightSync = FolderSync(
                served,
                patience,
                root=None if folder.path is None else Path(folder.path),
                dtype=None if folder.dtype is None else getattr(torch, folder.dtype),
                differences_in_a_row=folder.differences_in_a_row,
                loader=folder.loader,
                seconds=folder.seconds,
                in_flight=section.in_flight,
            )
        case AdapterWeightsSection(path=path):
            sync = AdapterSync(patience, root=None if path is None else Path(path))
    dtypes = {recipe.model.trained_dtype, getattr(section.weights, "dtype", None)}
    return VllmServerEngine(
        servers_of(section, seconds=section.request_seconds),
        sync,
        tokenizer,
        probe=_probe(recipe, section.probe, tokenizer, exact=dtypes <= {"float32", None}),
        patience=patience,
        requests_at_once=section.requests_at_once,
    )


def _probe(recipe: Recipe, section: ProbeSection, tokenizer: PreTrainedTokenizerBase, *, exact: bool) -> Probe:
    """The probe of a recipe; its default bound is narrow if trainer and sampler (``exact``) compute in float32."""
    exact = exact and recipe.model.autocast is None and recipe.model.trained_dtype == "float32"
    most = section.max_difference or (1e-3 if exact else 0.3)
    return Probe(probe_prompt(tokenizer, section.tokens), most, autocast=autocast_of(recipe.model))


def _gpu_engine(recipe: Recipe, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Engine:
    from logitless.rollout.gpu.engine import GpuEngine  # needs Triton: GPU_HERE

    if recipe.parallel.has_copy:
        return _sharded_engine(recipe, tokenizer, exact=False)
    return GpuEngine(model, tokenizer, **_options_of(recipe))


def sampling_engine(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, ranks: Ranks) -> "ShardedGpuEngine":
    """The engine of ranks that only sample, and share its weights.

    Args:
        recipe: with ``rollout.engine: gpu``, so that training has its bits.
        ranks: of ``sharing``.
    """
    engine = _sharded_engine(recipe, tokenizer, exact=True)
    engine.share(ranks)
    return engine


def _sharded_engine(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, exact: bool) -> "ShardedGpuEngine":
    from logitless.rollout.gpu.sharded import ShardedGpuEngine  # needs Triton

    copy = copy_that_samples(recipe.model, tokenizer)
    return ShardedGpuEngine(copy, tokenizer, device=device_of(recipe.model), exact=exact, **_options_of(recipe))


def _options_of(recipe: Recipe) -> dict[str, Any]:
    """Of ``GpuEngine``."""
    rollout = recipe.rollout
    return {
        "max_rows": rollout.max_rows,
        "prefill_tokens": rollout.prefill_tokens,
        "memory": rollout.engine.cache_bytes,
    }
