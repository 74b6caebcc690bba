"""The section ``rollout.engine``: what samples, how weights get there, and what each engine needs."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from logitless.errors import UnavailableError
from logitless.rollout.vllm.api import request_settings
from logitless.train.recipe.rule import Machine, Processes, Rule, Setting, chosen, given, needs_gpu, recipe_of, refusal
from logitless.train.recipe.section import Section

if TYPE_CHECKING:
    from logitless.train.recipe.config import Recipe


class EngineSection(Section):
    """What other code may ask of any engine, with the answers that most engines give."""

    samples_policy: ClassVar[bool] = False
    """Whether it samples with the policy's own module, in this process."""
    bitwise: ClassVar[bool] = False
    """Whether its log-probs are always bitwise those of training."""
    is_vllm: ClassVar[bool] = False

    @property
    def decodes_in_rounds(self) -> bool:
        """Whether it decodes with transformers: a set of completions to its end, then the next."""
        return self.samples_policy and not self.bitwise

    @property
    def choices(self) -> "tuple[GpuEngineSection, TransformersEngineSection] | None":
        """What ``auto`` chooses from: the bitwise engine where it can run, else the second. None for a named engine."""
        return None

    @property
    def cache_bytes(self) -> int | None:
        """Most bytes of the key-value cache; None: as many as the recipe needs."""
        return None

    @property
    def blocks_between_rescores(self) -> int:
        """Blocks from one bitwise check of the sampled log-probs to the next."""
        return 1

    @property
    def recorded_file(self) -> Path | None:
        """File of completions to replay."""
        return None

    @property
    def recorded_run(self) -> Path | None:
        """Folder of a run to replay block by block."""
        return None

    @property
    def recorded_column(self) -> str | None:
        """Column of the data with the completions' texts."""
        return None

    @property
    def samples_nothing(self) -> bool:
        """Whether completions were there before the run, and come from no weights that it knows."""
        return self.recorded_file is not None or self.recorded_column is not None

    @property
    def takes_adapters(self) -> bool:
        """Whether it is sent the LoRA adapter instead of whole weights."""
        return False

    @property
    def changes_in_flight(self) -> bool:
        """Whether it gets new weights while it is sampling."""
        return False


class TransformersEngineSection(EngineSection):
    """Sample with the policy itself, in this process."""

    name: Literal["transformers"] = "transformers"
    samples_policy: ClassVar[bool] = True


class RecordedEngineSection(EngineSection):
    """Train on completions that exist: token ids in a file, or texts in the data."""

    name: Literal["recorded"] = "recorded"
    path: str | None = Field(
        None, description="JSONL or Parquet file of `logitless sample`, or folder of a run with a log of its blocks"
    )
    column: str | None = Field(None, description="in place of `path`: column of data.train with the completion's text")

    @property
    def recorded_file(self) -> Path | None:
        return None if self.path is None or self.recorded_run else Path(self.path)

    @property
    def recorded_run(self) -> Path | None:
        return None if self.path is None or not Path(self.path).is_dir() else Path(self.path)

    @property
    def recorded_column(self) -> str | None:
        return self.column


class _OnGpu(EngineSection):
    samples_policy: ClassVar[bool] = True
    memory: PositiveInt | None = Field(
        None, description="bytes for keys and values while sampling on a GPU; None: half of what is free"
    )
    rescore_every: PositiveInt = Field(
        10, description="blocks after which a scoring pass is made all the same and compared bitwise"
    )

    @property
    def cache_bytes(self) -> int | None:
        return self.memory

    @property
    def blocks_between_rescores(self) -> int:
        return self.rescore_every


class GpuEngineSection(_OnGpu):
    """Sample on a GPU with the policy itself; its row-invariant layers give the log-probs of training, bit for bit."""

    name: Literal["gpu"] = "gpu"
    bitwise: ClassVar[bool] = True


class AutoEngineSection(_OnGpu):
    """`gpu` where the policy runs there with row-invariant layers, else `transformers`; the run says which, and why."""

    name: Literal["auto"] = "auto"

    @property
    def choices(self) -> "tuple[GpuEngineSection, TransformersEngineSection]":
        return GpuEngineSection(memory=self.memory, rescore_every=self.rescore_every), TransformersEngineSection()


class FolderWeightsSection(Section):
    """Whole weights, or what changed of them, in a folder that trainer and servers both see."""

    name: Literal["folder"] = "folder"
    path: str | None = Field(None, description="None: a private temporary folder")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="that weights are rounded to first, the server's; None: as they are trained"
    )
    differences_in_a_row: NonNegativeInt = Field(
        0, description="syncs that send changed weights alone, where that is shorter, before the next whole one"
    )
    loader: Literal["worker", "reload"] = Field(
        "worker", description="worker: by logitless inside vLLM's workers; reload: by vLLM's reload_weights"
    )
    seconds: PositiveFloat = Field(600.0, description="that a server may take to load")


class AdapterWeightsSection(Section):
    """The LoRA adapter alone; the servers hold the base model."""

    name: Literal["adapter"] = "adapter"
    path: str | None = Field(None, description="None: a private temporary folder")


class ProbeSection(Section):
    """After every weight sync, log-probs of a fixed prompt's continuation: trainer against sampler."""

    max_difference: PositiveFloat | None = Field(
        None, description="nats; None: 0.001 where everything is float32, else 0.3"
    )
    tokens: PositiveInt = Field(144, description="of the prompt, as far as they fit; more than a block of the cache")


class VllmServerEngineSection(EngineSection):
    """Sample on vLLM servers over HTTP."""

    name: Literal["vllm_server"] = "vllm_server"
    is_vllm: ClassVar[bool] = True
    urls: tuple[str, ...] = Field(min_length=1, description="http://127.0.0.1:8000 and the like, one or several")
    model: str | None = Field(None, description="the servers' name of the model; None: model.source")
    api_key_file: str | None = Field(None, description="file with the key; the key itself is never in a recipe")
    api_key_variable: str | None = Field(None, description="environment variable with the key")
    weights: FolderWeightsSection | AdapterWeightsSection = Field(
        default_factory=FolderWeightsSection, discriminator="name", description="how new weights reach the engine"
    )
    probe: ProbeSection = Field(default_factory=ProbeSection)
    request_seconds: PositiveFloat = Field(600.0, description="that one request may take")
    give_up_seconds: PositiveFloat = Field(300.0, description="that a request is repeated after its first failure")
    requests_at_once: PositiveInt = Field(64, description="prompts that a server has at a time")
    in_flight: bool = Field(
        False,
        description="with rollout.staleness: sync weights while completions are under way; each token carries its "
        "version",
    )

    @property
    def takes_adapters(self) -> bool:
        return self.weights.name == "adapter"

    @property
    def changes_in_flight(self) -> bool:
        return self.in_flight


AnyEngine: TypeAlias = (
    AutoEngineSection | TransformersEngineSection | RecordedEngineSection | GpuEngineSection | VllmServerEngineSection
)


# --- rules ----------------------------------------------------------------------------------------------------------


def _engine(recipe: "Recipe") -> Any:
    """The section, for a rule about one of its variants."""
    return recipe.rollout.engine


def _backends(recipe: "Recipe") -> tuple[str, str]:
    return recipe.train.scoring_backend, recipe.train.training_backend


def _not_applied_by_vllm(recipe: "Recipe") -> str:
    """Sampling settings that vLLM lacks or applies in another order; empty where there are none."""
    return "; ".join(filter(None, (refusal(partial(request_settings, each, ())) for each in recipe.samplings)))


recorded = chosen("rollout.engine.name", "recorded")
of_column = Setting["Recipe"]("rollout.engine.column", lambda recipe: recipe.rollout.engine.recorded_column is not None)
gpu = given("rollout.engine.bitwise", "rollout.engine gpu")
server = chosen("rollout.engine.name", "vllm_server")
in_flight = given("rollout.engine.changes_in_flight", "rollout.engine.in_flight")
adapter = given("rollout.engine.takes_adapters", "rollout.engine.weights adapter")

GPU_FUSED = gpu.needs(
    "the head's fused backend, whose log-probs it gives",
    holds=lambda recipe: {*_backends(recipe)} <= {"auto", "fused"},
    given=lambda recipe: "train.scoring_backend: {}, train.training_backend: {}".format(*_backends(recipe)),
    remedy="Leave train.scoring_backend and train.training_backend at auto.",
)

_FOLDER = "Set rollout.engine.weights: {name: folder}."

RULES: tuple[Rule["Recipe"], ...] = (
    recorded.needs(
        "one of path and column",
        holds=lambda recipe: (_engine(recipe).path is None) != (_engine(recipe).column is None),
        given=lambda recipe: "both" if _engine(recipe).path else "neither",
        remedy="Name a file of `logitless sample` as path, or the column of data.train that holds texts.",
    ),
    of_column.needs(
        "rollout.completions_per_prompt: 1, the text of the row",
        holds=lambda recipe: recipe.rollout.completions_per_prompt == 1,
        given=lambda recipe: str(recipe.rollout.completions_per_prompt),
        remedy="Set it to 1.",
    ),
    gpu.about(
        "model.layers",
        "model.layers: row_invariant or auto, through which it decodes",
        lambda layers: layers != "transformers",
        "Leave model.layers out.",
    ),
    gpu.excludes("model.lora.dropout"),
    GPU_FUSED,
    server.needs(
        "settings of sampling that vLLM applies in the same order: min_p without top_k and top_p, no logit_bias",
        given=_not_applied_by_vllm,
        remedy="Leave one of them out, or sample with rollout.engine: {name: transformers}.",
    ),
    server.needs(
        "one of api_key_file and api_key_variable",
        holds=lambda recipe: not (_engine(recipe).api_key_file and _engine(recipe).api_key_variable),
        given=lambda _: "both",
        remedy="Leave one of them out.",
    ),
    server.needs(
        "rollout.engine.model where model.source is a config",
        holds=lambda recipe: isinstance(recipe.model.source, str) or bool(_engine(recipe).model),
        given=lambda _: "model: null",
        remedy="Name the model as the servers do (--served-model-name).",
    ),
    in_flight.requires("rollout.staleness", remedy="Set it to 1 or more, or leave in_flight out."),
    in_flight.needs(
        "weights by folder: an adapter has a name of its own for each version",
        holds=lambda recipe: not recipe.rollout.engine.takes_adapters,
        given=lambda _: "weights: adapter",
        remedy="Leave weights or in_flight out.",
    ),
    adapter.requires("model.lora", remedy=_FOLDER),
    adapter.excludes("warm_start", ", which changes the base that the servers hold", remedy=_FOLDER),
    adapter.excludes("model.lora.modules_to_save", ", for vLLM loads low-rank factors alone", remedy=_FOLDER),
)

PROCESS_RULES: tuple[Rule[Processes], ...] = (
    gpu.on(recipe_of).needs(
        "whole weights or parallel.sampling_shards",
        holds=lambda processes: not processes.arrangement.is_sharded or processes.recipe.parallel.has_copy,
        given=lambda processes: f"weights sharded over {processes.arrangement.weights}",
        remedy="Set parallel.replicate to the number of processes, parallel.sampling_shards, or "
        "rollout.engine: {name: transformers}.",
    ),
)

GPU_HERE: Rule[Machine] = replace(
    needs_gpu(gpu, "a GPU and Triton", "rollout.engine={name: transformers}", kernels=True),
    given=lambda machine: machine.lacks(kernels=True) if machine.device == "cuda" else "a model on the CPU",
    kind=UnavailableError,
)

MACHINE_RULES = (GPU_HERE,)
