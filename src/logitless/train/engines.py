"""The one place where an engine is opened: a recipe names it, a member of a union describes it."""

import importlib.util
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from logitless.distributed.ranks import Ranks
from logitless.distributed.sharding import is_sharded
from logitless.errors import UnavailableError
from logitless.models.lm_head import lm_head
from logitless.rollout.engine import Engine, PushingEngine, Weights
from logitless.rollout.http_client import HttpClient, Patience, api_key
from logitless.rollout.nccl_transfer import NcclSync
from logitless.rollout.own_copy import OwnCopy, TurnTaking
from logitless.rollout.probe import Probe, probe_prompt
from logitless.rollout.recorded import RecordedEngine
from logitless.rollout.transformers import TransformersEngine
from logitless.rollout.vllm import VllmEngine
from logitless.rollout.vllm_api import VllmServer
from logitless.rollout.vllm_server import VllmServerEngine
from logitless.rollout.weight_sync import AdapterSync, FolderSync, WeightSync
from logitless.train.config import (
    AdapterWeightsSection,
    AutoEngineSection,
    FolderWeightsSection,
    GpuEngineSection,
    NcclWeightsSection,
    ProbeSection,
    Recipe,
    RecordedEngineSection,
    TransformersEngineSection,
    VllmEngineSection,
    VllmServerEngineSection,
)
from logitless.train.metrics import Numbers
from logitless.train.one_client import OneClientANode, ServerEngine
from logitless.train.setup import device_of, runs_row_invariant

logger = logging.getLogger("logitless")


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
        """Whether one of them samples with the module that it is handed, whose weights must then be whole."""
        return any(not isinstance(engine, RecordedEngine | OneClientANode) for engine in self.distinct)

    def load_all(self, weights: Weights, version: int) -> Numbers:
        """Every engine samples with these weights from now on; what those that push them somewhere say of it."""
        numbers: Numbers = {}
        for engine in self.distinct:
            engine.load(weights, version)
            if isinstance(engine, PushingEngine):
                numbers |= engine.hand_over
        return numbers

    def close(self) -> None:
        """Give back what they hold."""
        for engine in self.distinct:
            engine.close()


def engines_on(ranks: Ranks, engines: Engines) -> Engines:
    """The engines as several ranks share them: one rank of each node asks servers; any other engine is in each rank.

    A collective.

    Args:
        ranks: of the run.
        engines: that this rank opened.
    """
    if ranks.world == 1 or not isinstance(engines.training, ServerEngine):
        return engines
    shared = OneClientANode(engines.training, ranks)
    return Engines(shared, shared if engines.evaluation is engines.training else engines.evaluation)


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
    here = engine_here(recipe, model, tokenizer)
    training = OwnCopy(here.another()) if recipe.rollout.samples_with_a_copy else here
    match recipe.rollout.engine:
        case TransformersEngineSection():
            return Engines(training, here)
        case RecordedEngineSection(path=path) if Path(path).is_dir():
            return Engines(here, here)  # a run's log, which the collector reads: nothing is sampled for training
        case RecordedEngineSection(path=path):
            return Engines(RecordedEngine(Path(path)), here)
        case AutoEngineSection(memory=memory):
            if _device_type(model) == "meta":  # a dry run, which samples nothing
                return Engines(training, here)
            logger.info("rollout engine: %s", engine_line(recipe, model))
            if not_on_gpu_because(recipe, model):
                return Engines(training, here)
            gpu = _gpu_engine(recipe, model, tokenizer, memory)
            return Engines(gpu, gpu)
        case GpuEngineSection(memory=memory):
            gpu = _gpu_engine(recipe, model, tokenizer, memory)
            return Engines(gpu, gpu)
        case VllmServerEngineSection() as section:
            servers = _vllm_servers(recipe, section, tokenizer)
            if recipe.rollout.staleness > 0 and not section.in_flight:
                servers = TurnTaking(servers)
            return Engines(servers, servers)
        case VllmEngineSection() as section:
            vllm = _vllm(recipe, section, tokenizer)
            return Engines(vllm, vllm)


def engine_here(recipe: Recipe, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> TransformersEngine:
    """The engine that samples any model in this process, as a recipe sets it.

    Args:
        recipe: says how many rows and tokens at once, and in which dtype.
        model: that it samples with, until it is given other weights.
        tokenizer: of the model.
    """
    return TransformersEngine(
        model,
        tokenizer,
        max_rows=recipe.rollout.max_rows,
        prefill_tokens=recipe.rollout.prefill_tokens,
        autocast=None if recipe.model.autocast is None else getattr(torch, recipe.model.autocast),
    )


def _vllm_servers(recipe: Recipe, section: VllmServerEngineSection, tokenizer: PreTrainedTokenizerBase) -> Engine:
    key = api_key(section.api_key_file, section.api_key_variable)
    servers = [VllmServer(HttpClient(url, api_key=key, seconds=section.request_seconds)) for url in section.urls]
    patience = Patience(give_up_seconds=section.give_up_seconds)
    served = section.model or str(recipe.model.source)
    match section.weights:
        case FolderWeightsSection() as way:
            sync: WeightSync = FolderSync(
                served,
                patience,
                root=None if way.path is None else Path(way.path),
                dtype=None if way.dtype is None else getattr(torch, way.dtype),
                differences_in_a_row=way.differences_in_a_row,
                loader=way.loader,
                seconds=way.seconds,
                in_flight=section.in_flight,
            )
        case AdapterWeightsSection(path=path):
            sync = AdapterSync(patience, root=None if path is None else Path(path))
        case NcclWeightsSection(address=address, port=port):
            sync = NcclSync(
                served,
                patience,
                address=address,
                port=port,
                in_flight=section.in_flight,
                trains_meanwhile=recipe.rollout.staleness > 0,
            )
    dtypes = {recipe.model.trained_dtype, getattr(section.weights, "dtype", None)}
    return VllmServerEngine(
        servers,
        sync,
        tokenizer,
        probe=_probe(recipe, section.probe, tokenizer, exact=dtypes <= {"float32", None}),
        patience=patience,
        requests_at_once=section.requests_at_once,
    )


def _check_one_process(engine: str) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UnavailableError(
            needed=f"one trainer process under rollout.engine {engine}, for each would push the weights",
            given=f"{os.environ['WORLD_SIZE']} ranks",
            remedy="Start one, or sample with rollout.engine: {name: transformers}.",
        )


def _vllm(recipe: Recipe, section: VllmEngineSection, tokenizer: PreTrainedTokenizerBase) -> Engine:
    _check_one_process(section.name)
    if importlib.util.find_spec("vllm") is None:
        raise UnavailableError(
            needed="vLLM, for rollout.engine vllm",
            given="none",
            remedy="Install logitless[vllm], or sample on a server with rollout.engine: {name: vllm_server}.",
        )
    longest = max(each.max_new_tokens for each in recipe.samplings)
    return VllmEngine(
        tokenizer,
        dtype=section.dtype,
        context=section.context or recipe.data.max_prompt_tokens + longest,
        memory_fraction=section.memory_fraction,
        sleep=section.sleep,
        eager=section.eager,
        max_rows=recipe.rollout.max_rows,
        probe=_probe(recipe, section.probe, tokenizer, exact=section.dtype == "float32"),
    )


def _probe(recipe: Recipe, section: ProbeSection, tokenizer: PreTrainedTokenizerBase, *, exact: bool) -> Probe:
    """The probe of a recipe; without a bound of its own, a narrow one where both sides are float32."""
    exact = exact and recipe.model.autocast is None and recipe.model.trained_dtype == "float32"
    autocast = None if recipe.model.autocast is None else getattr(torch, recipe.model.autocast)
    return Probe(
        probe_prompt(tokenizer, section.tokens),
        section.max_difference or (1e-3 if exact else 0.3),
        autocast=autocast,
    )


def engine_line(recipe: Recipe, model: nn.Module) -> str:
    """What samples in a run, and why where ``auto`` chose it; on the meta device, what would."""
    engine = recipe.rollout.engine
    if not isinstance(engine, AutoEngineSection):
        return f"{engine.name}, set by the recipe"
    reason = not_on_gpu_because(recipe, model)
    return f"transformers, for {reason}" if reason else "gpu, with the bits of training"


def not_on_gpu_because(recipe: Recipe, model: nn.Module) -> str:
    """What keeps ``auto`` from sampling with the bits of training, in words; empty where nothing does.

    A model on the meta device is taken for one on the recipe's device.
    """
    backends = {recipe.train.scoring_backend, recipe.train.training_backend}
    if recipe.rollout.staleness > 0:
        return "blocks are collected while the policy is trained, with a copy of it"
    kind, device = _device_type(model), device_of(recipe.model)
    kind = device.type if kind == "meta" else kind
    if kind != "cuda":
        waits = kind == "cpu" and device.type == "cuda"  # in the host's memory, to be cut
        return "its weights are to be sharded" if waits else f"the model is on {kind}"
    if not runs_row_invariant(recipe.model, device, model):
        return "its layers are not row-invariant ones"
    if any(is_sharded(parameter) for parameter in model.parameters()):
        return "its weights are sharded"
    if lm_head(model).lora_a is not None:
        return "there is an adapter on the LM head"
    if not backends <= {"auto", "fused"}:
        return "the recipe names another backend of the head than the fused one"
    return ""


def _device_type(model: nn.Module) -> str:
    return next(model.parameters()).device.type


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
