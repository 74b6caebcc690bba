"""The recipe of a run: one YAML file, typed, checked as a whole before anything is loaded.

Each section is a frozen pydantic model; parts with variants (surrogates, advantages, rewards, data sources) are unions
told apart by ``name``, so a variant has only its own knobs. ``docs/configuration.md`` is generated from these types.
"""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from logitless.data.sources import RESERVED_SOURCES, DataOptions, MixedData, SourceName, TrainingData
from logitless.errors import ConfigurationError
from logitless.models.reward_model import RewardModel
from logitless.objective.advantage import Advantage
from logitless.objective.correction import SamplerCorrection
from logitless.objective.divergence import KLPenalty
from logitless.objective.filters import Filter
from logitless.objective.kl_control import KLControl
from logitless.objective.objective import EntropyBonus, Ratio
from logitless.objective.own import OwnAdvantage, OwnSurrogate
from logitless.objective.surrogate import Surrogate
from logitless.objective.value import ValueLoss
from logitless.objective.weighting import Weighting
from logitless.rewards.combine import Unscored
from logitless.rewards.options import RewardOptions
from logitless.rollout.environment import Limits
from logitless.rollout.environments import EnvironmentOptions, pays
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.vllm_api import sampling_fields

AnyReward: TypeAlias = Annotated[RewardOptions | RewardModel, Field(discriminator="name")]
"""Those that read text by rules, and the one that a model gives."""

Backend = Literal["auto", "reference", "chunked", "fused"]


Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of a recipe: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False)


class LoraSection(Section):
    """Train low-rank factors on a frozen base model; the reference is the base model with the adapter off."""

    rank: PositiveInt = Field(16, description="R, rank of the factors")
    alpha: PositiveFloat = Field(32.0, description="the factors' product is scaled by alpha / rank")
    targets: tuple[str, ...] | Literal["all-linear"] = Field("all-linear", description="module names to adapt")
    use_rslora: bool = Field(False, description="scale by alpha / sqrt(rank) instead")
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="of the factors' inputs, in training passes alone: what samples and scores is the whole policy, so "
        "that the first step's ratio is not 1, `logp_old` has a pass of its own, and neither row-invariant layers nor "
        "the GPU engine run",
    )
    modules_to_save: tuple[str, ...] = Field(
        (),
        description="ends of the names of modules to train whole beside the factors, such as lm_head, embed_tokens, "
        "norm (every norm); in `trained_dtype`, which must be `dtype`. Saved and exported with the adapter; "
        "row-invariant layers run beside lm_head alone, and vLLM takes no such adapter (weights: {name: adapter})",
    )


class ModelSection(Section):
    """Which model is trained, and how it is held in memory."""

    source: str | dict[str, Any] = Field(
        description="hub name, folder, GGUF file, or a transformers config as a mapping"
    )
    random_weights: bool = Field(False, description="build the model from its config with seeded random weights")
    tokenizer: str | None = Field(None, description="hub name, folder or GGUF file; default: `source`")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="variables of the chat template, for example `enable_thinking: false` (Qwen3), wherever the "
        "policy's prompts and turns are rendered: training, held-out sets, environments, `sample` and `serve-engine`",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="of frozen weights (LoRA's base, the reference); auto: as `trained_dtype` chooses, and float32 on "
        "a CPU",
    )
    trained_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="of trained weights in forward, backward and sampling; under bfloat16 the optimizer and "
        "checkpoints hold float32 masters, and gradients are summed in float32; auto: bfloat16 on a GPU that computes "
        "in it, unless model.autocast is set, else float32 (docs/numerics.md). The run folder's `config.yaml` has the "
        "dtype that was chosen",
    )
    autocast: Literal["bfloat16"] | None = Field(None, description="dtype of the products in forward and backward")
    attention: Literal["packed", "sdpa", "eager", "flex_attention"] = Field(
        "packed", description="packed: own packed attention; the others: transformers' with a block-diagonal mask"
    )
    layers: Literal["auto", "transformers", "row_invariant", "liger"] = Field(
        "auto",
        description="transformers: the model's own; row_invariant: fused, and with one set of bits in any packed row "
        "(docs/bits.md), for the families listed there, on a GPU; auto: row_invariant where they serve a model in 16 "
        "bits, else transformers, and the run says why; liger: Liger's norm, rotary embedding and gated MLP, if they "
        "agree with plain ones on this GPU",
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, ...")
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward")
    compile: bool = Field(False, description="torch.compile the decoder's layers")
    drop_router_loss: bool = Field(False, description="train a mixture of experts without its load-balancing loss")
    matmul_precision: Literal["highest", "high", "medium"] = Field(
        "highest", description="torch.set_float32_matmul_precision: high and medium allow TF32"
    )
    sdpa_backends: tuple[Literal["flash", "efficient", "cudnn", "math"], ...] | None = Field(
        None, description="kernels that scaled_dot_product_attention may choose from; None: torch's choice"
    )
    allocator: str | None = Field(
        "expandable_segments:True",
        description="PYTORCH_CUDA_ALLOC_CONF, unless the environment sets it or PYTORCH_ALLOC_CONF already",
    )
    trust_remote_code: bool = Field(False, description="run code that the model repository ships")
    lora: LoraSection | None = Field(None, description="None: full fine-tuning")
    quantize: Literal["nf4"] | None = Field(
        None,
        description="nf4: LoRA's base in four bits a weight, by bitsandbytes, which promises no bits and cannot be "
        "merged; None: in `dtype`",
    )

    @property
    def activation_bytes(self) -> int:
        """Of a number in activations: that of the products' dtype."""
        half = self.autocast is not None or self.trained_dtype != "float32"
        return 2 if half or (self.lora is not None and self.dtype != "float32") else 4


class DataSection(Section):
    """Where prompts come from."""

    train: TrainingData = Field(description="prompts to train on, of one source or of a mixture")
    held_out: DataOptions | None = Field(None, description="prompts to evaluate on, removed from training; or None")
    max_prompt_tokens: PositiveInt = Field(512, description="tokens; longer prompts are handled as `too_long` says")
    too_long: Literal["drop", "error"] = Field("drop", description="what a longer prompt is; dropped ones are counted")


class WarmStartSection(Section):
    """A supervised stage before the first rollout: `nll` of a column's text through the same head."""

    data: DataOptions = Field(description="prompts with their answers")
    answer_column: str = Field("answer", description="column with the text to imitate")
    steps: PositiveInt = Field(100, description="optimizer steps")
    sequences_per_step: PositiveInt = Field(64, description="prompt-answer pairs a step")
    learning_rate: PositiveFloat = Field(1e-3, description="of AdamW, at its peak")
    schedule: Literal["constant", "linear"] = Field("linear", description="constant, or linear decay to 0")


class TransformersEngineSection(Section):
    """Sample with the policy itself, in this process."""

    name: Literal["transformers"] = "transformers"


class RecordedEngineSection(Section):
    """Replay completions from a file."""

    name: Literal["recorded"] = "recorded"
    path: str = Field(
        description="JSONL or Parquet file of completions, or the folder of a run with rollout.staleness, which is "
        "replayed block by block"
    )


class _OnGpu(Section):
    memory: PositiveInt | None = Field(
        None, description="bytes for keys and values while sampling on a GPU; None: half of what is free then"
    )
    recount_every: PositiveInt = Field(
        10, description="blocks after which a scoring pass is made all the same and compared, bit for bit"
    )


class GpuEngineSection(_OnGpu):
    """Sample on a GPU with the policy itself, by its row-invariant layers: with the bits of training."""

    name: Literal["gpu"] = "gpu"


class AutoEngineSection(_OnGpu):
    """`gpu` where the policy runs there with row-invariant layers, else `transformers`; the run says which, and why."""

    name: Literal["auto"] = "auto"


class FolderWeightsSection(Section):
    """Whole weights, or what changed of them, in a folder that trainer and servers both see."""

    name: Literal["folder"] = "folder"
    path: str | None = Field(None, description="None: a private temporary folder")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="that weights are rounded to first, the server's; None: as they are trained"
    )
    differences_in_a_row: NonNegativeInt = Field(
        0, description="pushes that send changed weights alone, where that is shorter, before the next whole one"
    )
    loader: Literal["worker", "reload"] = Field(
        "worker", description="worker: by logitless inside vLLM's workers; reload: by vLLM's reload_weights"
    )
    seconds: PositiveFloat = Field(600.0, description="that a server may take to load")


class AdapterWeightsSection(Section):
    """The LoRA adapter alone; the servers hold the base model."""

    name: Literal["adapter"] = "adapter"
    path: str | None = Field(None, description="None: a private temporary folder")


class NcclWeightsSection(Section):
    """From GPU to GPU, by vLLM's own transfer. Not measured yet."""

    name: Literal["nccl"] = "nccl"
    address: str = Field("127.0.0.1", description="of this machine, as the servers reach it")
    port: PositiveInt = Field(29600, description="free on this machine; each further server takes the next")


class ProbeSection(Section):
    """After every push, log-probs of a fixed prompt's continuation: trainer against sampler."""

    max_difference: PositiveFloat | None = Field(
        None, description="nats; None: 0.001 where everything is float32, else 0.3"
    )
    tokens: PositiveInt = Field(144, description="of the prompt, as far as they fit; more than a block of the cache")


class VllmServerEngineSection(Section):
    """Sample on vLLM servers over HTTP."""

    name: Literal["vllm_server"] = "vllm_server"
    urls: tuple[str, ...] = Field(min_length=1, description="http://127.0.0.1:8000 and the like, one or several")
    model: str | None = Field(None, description="the servers' name of the model; None: model.source")
    api_key_file: str | None = Field(None, description="file with the key; the key itself is never in a recipe")
    api_key_variable: str | None = Field(None, description="environment variable with the key")
    weights: FolderWeightsSection | AdapterWeightsSection | NcclWeightsSection = Field(
        default_factory=FolderWeightsSection, discriminator="name", description="the way of the weights"
    )
    probe: ProbeSection = Field(default_factory=ProbeSection)
    request_seconds: PositiveFloat = Field(600.0, description="that one request may take")
    give_up_seconds: PositiveFloat = Field(300.0, description="that a request is repeated after its first failure")
    requests_at_once: PositiveInt = Field(64, description="prompts that a server has at a time")
    in_flight: bool = Field(
        False,
        description="beside rollout.staleness: push while completions are under way, which go on with the new weights; "
        "each token carries its version",
    )


class VllmEngineSection(Section):
    """Sample with vLLM in this process. Sleep and wake are for GPUs, and not measured yet."""

    name: Literal["vllm"] = "vllm"
    dtype: Literal["float32", "bfloat16", "float16"] = Field("bfloat16", description="of weights and products")
    context: PositiveInt | None = Field(
        None, description="tokens of prompt and completion; None: what the recipe needs at most"
    )
    memory_fraction: float = Field(0.4, gt=0, lt=1, description="of the GPU's memory, weights included")
    sleep: bool = Field(False, description="give the memory away while training; GPUs only")
    eager: bool = Field(False, description="run without CUDA graphs")
    probe: ProbeSection = Field(default_factory=ProbeSection)


class ParityThresholds(Section):
    """Bounds of |logp_old - logp_sampler| over a block."""

    mean: PositiveFloat | None = Field(None, description="nats, over tokens")
    p95: PositiveFloat | None = Field(None, description="nats, over tokens")
    max: PositiveFloat | None = Field(None, description="nats, over tokens")
    sequence: PositiveFloat | None = Field(
        None, description="nats, of the largest |sum over a completion| of logp_old - logp_sampler"
    )


class ParitySection(Section):
    """The gate between sampler and trainer, at every block whose tokens were drawn from the policy's own softmax."""

    warn: ParityThresholds = Field(default_factory=ParityThresholds, description="above one of them, a message")
    stop: ParityThresholds = Field(default_factory=ParityThresholds, description="above one of them, the run ends")

    @property
    def has_threshold(self) -> bool:
        """Whether anything is warned of or stopped at."""
        return self != ParitySection()


class RolloutSection(Section):
    """One round of generation: a block."""

    engine: (
        AutoEngineSection
        | TransformersEngineSection
        | RecordedEngineSection
        | GpuEngineSection
        | VllmServerEngineSection
        | VllmEngineSection
    ) = Field(default_factory=AutoEngineSection, discriminator="name", description="what samples")
    parity: ParitySection = Field(default_factory=ParitySection)
    environment: Annotated[EnvironmentOptions, Field(discriminator="name")] | None = Field(
        None, description="what answers the policy between its turns; None: a completion is a single turn"
    )
    limits: Limits = Field(default_factory=Limits, description="of an episode, where there is an environment")
    staleness: NonNegativeInt = Field(
        0,
        description="blocks that may be collected ahead while others are trained on, each by weights that have seen at "
        "most so many blocks less; 0: strictly on policy. What was drawn is logged, so that the run can be repeated",
    )
    prompts_per_block: PositiveInt = Field(32, description="P, prompts a block")
    completions_per_prompt: PositiveInt = Field(8, description="G, completions a prompt")
    max_rows: PositiveInt = Field(512, description="completions decoded at once, here and in evaluation")
    prefill_tokens: PositiveInt = Field(16384, description="tokens of prompts that the engine reads at once")
    sampling: SamplingOptions = Field(description="temperature, filters, limits, stops")
    zero_signal: Literal["keep", "drop", "refill"] = Field(
        "keep", description="groups whose rewards are all equal: train on them, leave them out, or draw others"
    )
    max_refills: NonNegativeInt = Field(3, description="further rounds of generation under `refill`")
    unscored: Unscored = Field(
        "leave_out",
        description="a completion that a function could not judge: sum the others, or drop the completion (no reward)",
    )

    @property
    def longest_completion(self) -> int:
        """Tokens that a completion can have, those that its environment writes included."""
        most = self.sampling.max_new_tokens
        return most if self.environment is None else self.limits.max_tokens or most

    @property
    def samples_with_a_copy(self) -> bool:
        """Whether blocks are collected ahead in this process, where the policy itself is being trained."""
        return self.staleness > 0 and isinstance(self.engine, AutoEngineSection | TransformersEngineSection)


class AlgorithmSection(Section):
    """A paper's composition, with parts replaced by name."""

    preset: str = Field("grpo", description="a paper's name, see docs/objectives.md")
    parameters: dict[str, Any] = Field(default_factory=dict, description="of the preset, in its paper's terms")
    ratio: Annotated[Ratio, Field(discriminator="name")] | None = Field(None, description="replaces the preset's")
    surrogate: Annotated[Surrogate | OwnSurrogate, Field(discriminator="name")] | None = Field(
        None, description="replaces the preset's"
    )
    filters: tuple[Annotated[Filter, Field(discriminator="name")], ...] | None = Field(
        None, description="replaces the preset's"
    )
    correction: SamplerCorrection | None = Field(None, description="sampler correction (importance sampling)")
    entropy_bonus: EntropyBonus | None = Field(None, description="replaces the preset's")
    advantage: Annotated[Advantage | OwnAdvantage, Field(discriminator="name")] | None = Field(
        None, description="replaces the preset's"
    )
    weighting: Annotated[Weighting, Field(discriminator="name")] | None = Field(
        None, description="replaces the preset's"
    )
    value_loss: ValueLoss | None = Field(
        None, description="replaces the preset's; goes with an advantage that reads values (`gae`), and only with one"
    )


class ValueHeadSection(Section):
    """The linear layer that predicts returns, on the policy's backbone, for algorithms with a value loss (PPO)."""

    learning_rate_factor: PositiveFloat = Field(
        10.0, description="the head's learning rate, as a multiple of the optimizer's; it is never decayed"
    )
    source: str | None = Field(
        None, description="`value_head.safetensors` of a finished run to start from; None: every weight 0"
    )


class _KL(Section):
    control: Annotated[KLControl, Field(discriminator="name")] = Field(description="fixed or adaptive coefficient")
    update: Literal["step", "epoch"] = Field("step", description="when the coefficient moves")


class KLInLoss(_KL):
    """A term of the loss that keeps the policy near the reference."""

    placement: Literal["loss"]
    penalty: KLPenalty = Field(default_factory=KLPenalty, description="estimator, ratio correction, clamp")


class KLInReward(_KL):
    """k1 subtracted from the reward: per token for token returns, else its sum over the sequence."""

    placement: Literal["reward"]


class OptimizerSection(Section):
    """AdamW."""

    learning_rate: PositiveFloat = Field(1e-6, description="peak")
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="decay of the moments, each in [0, 1)")
    eps: PositiveFloat = Field(1e-8, description="added to the denominator")
    weight_decay: float = Field(0.0, ge=0, description="decoupled; not on vectors")
    implementation: Literal["auto", "foreach", "fused", "loop"] = Field("auto", description="of torch.optim.AdamW")
    moments: Literal["float32", "8bit", "host"] = Field(
        "float32",
        description="AdamW's two numbers a weight. 8bit: 2 bytes instead of 8, by torchao; host: they and the float32 "
        "masters wait in the host's memory, the same bits for the time that they travel (docs/performance.md)",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after warm-up, to 0 at the end")
    warmup_steps: NonNegativeInt = Field(0, description="optimizer steps of linear warm-up")


class TrainSection(Section):
    """The loop."""

    blocks: PositiveInt = Field(100, description="rounds of generation")
    epochs_per_block: PositiveInt = Field(1, description="E, passes over a block")
    tokens_per_step: PositiveInt = Field(65536, description="scored tokens an optimizer step aims at")
    tokens_per_micro_batch: PositiveInt = Field(16384, description="most tokens read at once; memory and speed only")
    share_prompts: bool = Field(
        True,
        description="read once what sequences of a packed row begin with: a prompt for its completions, instructions "
        "for their prompts; a model whose attention cannot (longrope, masks made by transformers) says so and reads it "
        "each time",
    )
    pack_by_cost: bool = Field(
        True, description="fill packed rows by the work they make, attention included; false: in order"
    )
    leave_out_dead: bool = Field(
        True,
        description="keep sequences that can change no gradient out of forward and backward: advantage or weight 0, "
        "under an algorithm without a KL, an entropy bonus or a value loss",
    )
    reuse_logp: bool = Field(
        True,
        description="take logp_old from the training pass itself where a block is used once, by one step, and nothing "
        "reads it before; a training pass with dropout (model.lora.dropout) gives none",
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
    max_blocks_without_signal: PositiveInt = Field(20, description="such blocks in a row that stop the run")
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    training_backend: Backend = Field("auto", description="head backend with gradients")
    scoring_backend: Backend = Field("auto", description="head backend without")
    head_memory_budget: PositiveInt | None = Field(None, description="bytes of logits-like memory; None: chosen")
    activation_memory: PositiveInt | None = Field(
        None,
        description="bytes that the layers may take for a micro-batch, at the peak of the backward; as few of them as "
        "possible are recomputed, or kept on the host, to fit (docs/performance.md); None: no limit",
    )


class ParallelSection(Section):
    """Several processes, started by torchrun; one process alone needs none of it (docs/scale.md)."""

    shard: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="processes over which the weights of one copy are sharded (FSDP2); auto: all that replicate and "
        "sequence leave",
    )
    replicate: PositiveInt = Field(1, description="copies of the weights")
    sequence: PositiveInt = Field(
        1, description="processes that share each sequence (Ulysses); weights are sharded over them too"
    )
    vocabulary: Literal["auto", "own_rows", "all_rows"] = Field(
        "auto",
        description="where the LM head is sharded. own_rows: each process scores its own tokens, and the shards come "
        "by; all_rows: each scores the tokens of all against its shard; auto: where fewer bytes travel",
    )
    reference: Literal["device", "host"] = Field("device", description="where the reference's shards wait")
    deterministic: bool = Field(
        False,
        description="sum gradients along one tree of micro-batches, so that they have the same bits on 1, 2, 4, ... "
        "processes; every process then holds all weights",
    )
    timeout_seconds: PositiveInt = Field(
        1800,
        description="how long processes wait for each other; longer than the longest rollout of one, and than reading "
        "the model",
    )


class _Judged(Section):
    every_blocks: PositiveInt = Field(10, description="also before the first and after the last block")
    samples_per_prompt: PositiveInt = Field(1, description="completions a prompt; of several, pass@k is told too")
    sampling: SamplingOptions | None = Field(None, description="default: the rollout's at temperature 0")
    success_at: float = Field(1.0, description="reward from which a completion counts as correct")


class HeldOutSection(_Judged):
    """A further set of held-out prompts, with settings and metrics (`held_out/<name>/...`) of its own."""

    data: DataOptions = Field(description="prompts, removed from training")


class WatchSection(Section):
    """A metric of held-out prompts, and which way is better."""

    metric: str = Field(
        "evaluation/accuracy",
        pattern=r"^(evaluation|held_out/[^/]+)/.+$",
        description="of `data.held_out` (`evaluation/...`) or of a set (`held_out/<set>/...`), see docs/metrics.md",
    )
    mode: Literal["max", "min"] = Field("max", description="max: a larger value is better; min: a smaller one")

    @property
    def of_set(self) -> str:
        """What the names of the set's metrics begin with."""
        parts = self.metric.split("/")
        return "/".join(parts[: 1 if parts[0] == "evaluation" else 2]) + "/"


class StopSection(WatchSection):
    """Early stopping: the run is complete once a metric has not become better for some evaluations."""

    patience: PositiveInt = Field(description="evaluations in a row without a better value that end the run")
    min_delta: NonNegativeFloat = Field(0.0, description="by which a value must be better than the best to count")


class EvaluationSection(_Judged):
    """Held-out prompts, with their own sampling settings."""

    stop: StopSection | None = Field(None, description="early stopping; None: the run has `train.blocks` blocks")
    sets: dict[SourceName, HeldOutSection] = Field(
        default_factory=dict, description="further held-out sets by a name of your own; a reward may name it in sources"
    )


class CheckpointSection(Section):
    """Saves that `--resume` continues from."""

    every_blocks: PositiveInt = Field(10, description="also at the end and on Ctrl-C")
    keep: PositiveInt = Field(2, description="latest checkpoints kept")
    keep_best: WatchSection | None = Field(
        None,
        description="keep the checkpoint of the best evaluation too, and export it at the end; None: the last weights "
        "are exported",
    )


class TensorBoardSection(Section):
    """Event files in the run folder; `tensorboard --logdir runs` reads them."""

    name: Literal["tensorboard"] = "tensorboard"


class WandbSection(Section):
    """Weights & Biases. A run that is resumed goes on in the same run there; its id is in the run folder."""

    name: Literal["wandb"] = "wandb"
    project: str = Field("logitless", description="made if it is not there")
    entity: str | None = Field(None, description="user or team; None: the login's default")
    run_name: str | None = Field(None, description="shown there; None: the run's name")
    run_id: str | None = Field(None, description="of a run there to go on with, or to make; None: one of its own")
    group: str | None = Field(None, description="of runs that belong together")
    tags: tuple[str, ...] = Field((), description="of the run")
    notes: str | None = Field(None, description="about the run")
    mode: Literal["online", "offline", "disabled"] | None = Field(None, description="None: WANDB_MODE, or online")


class TrackioSection(Section):
    """trackio, on this machine or in a Space. A run that is resumed goes on in the same run there."""

    name: Literal["trackio"] = "trackio"
    project: str = Field("logitless", description="made if it is not there")
    run_name: str | None = Field(None, description="shown there; None: the run's name")
    group: str | None = Field(None, description="of runs that belong together")
    space_id: str | None = Field(None, description="Space of the hub that gets the numbers; None: this machine")
    private: bool | None = Field(None, description="whether a Space that is made is private; None: its owner's default")


class MlflowSection(Section):
    """MLflow. A run that is resumed goes on in the same run there; its id is in the run folder."""

    name: Literal["mlflow"] = "mlflow"
    tracking_uri: str | None = Field(
        None, description="of the server or folder; None: MLFLOW_TRACKING_URI, or MLflow's"
    )
    experiment: str = Field("logitless", description="made if it is not there")
    run_name: str | None = Field(None, description="shown there; None: the run's name")
    run_id: str | None = Field(None, description="of a run there to go on with; None: a new one")
    tags: dict[str, str] = Field(default_factory=dict, description="of the run")


WriterSection: TypeAlias = TensorBoardSection | WandbSection | TrackioSection | MlflowSection


class Recipe(Section):
    """A complete run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="of the run folder")
    schema_number: Literal[1] = Field(1, description="of the recipe's format; a later one needs a later logitless")
    seed: NonNegativeInt = Field(0, lt=2**63, description="of everything random, below 2^63")
    output: str = Field("runs", description="folder of run folders")
    model: ModelSection
    data: DataSection
    warm_start: WarmStartSection | None = None
    rollout: RolloutSection
    rewards: tuple[AnyReward, ...] = Field(
        description="several are summed with their weights; `[]` beside an environment that pays by itself"
    )
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    value_head: ValueHeadSection | None = Field(
        None, description="None: its defaults where the algorithm has a value loss, else no value head"
    )
    kl: KLInLoss | KLInReward | None = Field(
        None, discriminator="placement", description="distance to the reference; None: no reference is loaded"
    )
    train: TrainSection = Field(default_factory=TrainSection)
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    writers: tuple[Annotated[WriterSection, Field(discriminator="name")], ...] = Field(
        ("tensorboard",),
        validate_default=True,
        description="where metrics go besides the run folder; a name alone has its defaults",
    )

    @property
    def samplings(self) -> tuple[SamplingOptions, ...]:
        """Every setting of sampling that is written out, the rollout's first."""
        judged = (self.evaluation, *self.evaluation.sets.values())
        return (self.rollout.sampling, *(each.sampling for each in judged if each.sampling is not None))

    @property
    def training_sources(self) -> tuple[str, ...]:
        """Names of the data that is trained on; ``train`` where there is one source."""
        return tuple(self.data.train.sources) if isinstance(self.data.train, MixedData) else ("train",)

    @field_validator("writers", mode="before")
    @classmethod
    def _sections_of_names(cls, given: Any) -> Any:
        if not isinstance(given, list | tuple):
            return given
        return [{"name": each} if isinstance(each, str) else each for each in given]

    def _check_sources(self) -> None:
        """Names are of one thing each, and everything has a reward that judges it."""
        sets = set(self.evaluation.sets)
        taken = sets & {*RESERVED_SOURCES, *self.training_sources}
        _require(
            not taken,
            "names of evaluation.sets that are neither train, held_out nor those of sources",
            ", ".join(sorted(taken)),
            "Give the set another name, for example with -test at its end.",
        )
        held_out = ("held_out",) if self.data.held_out is not None else ()
        known = (*self.training_sources, *held_out, *self.evaluation.sets)
        named = {name for reward in self.rewards for name in reward.sources or ()}
        _require(
            named <= set(known),
            f"names of data in `sources` of a reward: {', '.join(known)}",
            ", ".join(sorted(named - set(known))),
            "Correct the name, or leave `sources` out for a reward that judges everything.",
        )
        unjudged = [
            name
            for name in known
            if self.rewards and all(r.gate or (r.sources is not None and name not in r.sources) for r in self.rewards)
        ]
        _require(
            not unjudged,
            "a reward, other than a gate, for each of the data",
            f"none for {', '.join(unjudged)}",
            "Add the name to `sources` of a reward, or leave `sources` out.",
        )

    def _check_watched(self) -> None:
        """Metrics that early stopping and the best checkpoint follow are of prompts that are evaluated."""
        there = ["evaluation/"] * (self.data.held_out is not None)
        there += [f"held_out/{name}/" for name in self.evaluation.sets]
        for key, section in (
            ("evaluation.stop", self.evaluation.stop),
            ("checkpoint.keep_best", self.checkpoint.keep_best),
        ):
            _require(
                section is None or section.of_set in there,
                f"held-out prompts for {key}.metric",
                f"{section.metric if section else None}, and there are {' and '.join(there) or 'none'}",
                "Give data.held_out, or name a metric of a set of evaluation.sets.",
            )

    @model_validator(mode="after")
    def _parts_fit(self) -> "Recipe":
        self._check_sources()
        named = [each.name for each in self.writers]
        _require(
            len(set(named)) == len(named),
            "each of `writers` once",
            ", ".join(named),
            "Leave the second one out.",
        )
        self._check_watched()
        rollout = self.rollout
        _require(
            bool(self.rewards) or pays(rollout.environment),
            "rewards, or a rollout.environment that pays by itself (own, guessing, harness, tools with a call_reward)",
            "rewards: [] beside " + ("no environment" if rollout.environment is None else rollout.environment.name),
            "Name a reward; docs/own_reward.md has a template.",
        )
        of_turns = [each.max_new_tokens for each in self.samplings]
        _require(
            rollout.environment is None or (rollout.limits.max_tokens or 0) >= max(of_turns),
            f"rollout.limits.max_tokens beside an environment, of at least {max(of_turns)}, one turn's tokens",
            str(rollout.limits.max_tokens),
            "Set it to the tokens of a whole episode, what the environment says included.",
        )
        _require(
            rollout.environment is not None or rollout.limits == Limits(),
            "rollout.environment beside rollout.limits",
            "limits for single turns, which sampling.max_new_tokens bounds",
            "Leave rollout.limits out.",
        )
        longest = self.data.max_prompt_tokens + rollout.longest_completion - 1
        _require(
            longest <= self.train.tokens_per_micro_batch,
            f"train.tokens_per_micro_batch of at least {longest}, one sequence of the longest prompt and completion",
            str(self.train.tokens_per_micro_batch),
            "Raise it, or lower data.max_prompt_tokens or rollout.sampling.max_new_tokens (rollout.limits.max_tokens).",
        )
        _require(
            self.rollout.sampling.temperature > 0,
            "a positive rollout.sampling.temperature, which also divides the logits in the loss",
            str(self.rollout.sampling.temperature),
            "Sample at temperature 1, or set evaluation.sampling for greedy evaluation.",
        )
        _require(
            self.rollout.completions_per_prompt > 1 or self.rollout.zero_signal == "keep",
            "at least two completions a prompt, for their rewards to differ, or rollout.zero_signal: keep",
            f"rollout.completions_per_prompt=1, rollout.zero_signal={self.rollout.zero_signal}",
            "Raise the first, or set the second to keep.",
        )
        _require(
            self.model.lora is not None or self.model.dtype in ("auto", "float32") or self.kl is not None,
            "frozen weights for model.dtype to apply to",
            f"model.dtype={self.model.dtype} with full fine-tuning and no reference",
            "Remove it, or set model.autocast to make products in bfloat16.",
        )
        _require(
            self.model.quantize is None or self.model.lora is not None,
            "model.lora beside model.quantize, for weights in four bits are not trained",
            "full fine-tuning",
            "Set model.lora: {}, or leave model.quantize out.",
        )
        _require(
            self.model.quantize is None or self.warm_start is None,
            "a base that stays as it is beside model.quantize",
            "a warm_start, whose adapter would be merged into it",
            "Leave one of them out.",
        )
        _require(
            self.model.quantize is None or self.model.layers in ("auto", "transformers"),
            "model.layers: auto or transformers beside model.quantize, whose products have no one set of bits",
            self.model.layers,
            "Leave model.layers out.",
        )
        lora = self.model.lora
        _require(
            lora is None
            or not lora.dropout
            or (self.model.layers != "row_invariant" and not isinstance(self.rollout.engine, GpuEngineSection)),
            "model.layers and rollout.engine that leave dropout to training passes",
            f"model.lora.dropout={lora.dropout if lora else 0} beside model.layers: {self.model.layers} and "
            f"rollout.engine: {self.rollout.engine.name}",
            "Leave both at auto, or set model.lora.dropout: 0 for the same bits in sampling and training.",
        )
        for reward in self.rewards:
            _require(
                reward.metric_name.isprintable() and "/" not in reward.metric_name,
                "labels of rewards without a slash, which separates the parts of a metric's name",
                repr(reward.metric_name),
                "Write for example a dash.",
            )
        _require(
            self.model.layers != "row_invariant"
            or (self.model.attention == "packed" and self.model.autocast is None and not self.model.compile),
            "model.attention: packed, no model.autocast and no model.compile beside model.layers: row_invariant",
            f"{self.model.attention}, {self.model.autocast}, {self.model.compile}",
            "Leave them out; model.trained_dtype: bfloat16 (model.dtype under LoRA) gives products in bfloat16.",
        )
        _require(
            self.train.activation_memory is None or not (self.model.gradient_checkpointing or self.model.compile),
            "one way to save activations beside train.activation_memory, and no model.compile",
            f"model.gradient_checkpointing={self.model.gradient_checkpointing}, model.compile={self.model.compile}",
            "Leave model.gradient_checkpointing and model.compile out.",
        )
        optimizer = self.train.optimizer
        _require(
            optimizer.moments == "float32" or optimizer.implementation == "auto",
            "train.optimizer.moments: float32 beside an implementation of torch.optim.AdamW",
            f"moments={optimizer.moments}, implementation={optimizer.implementation}",
            "Leave implementation out.",
        )
        _require(
            optimizer.moments != "host" or (self.model.trained_dtype != "float32" and not self.parallel.deterministic),
            "model.trained_dtype: bfloat16, whose masters go to the host, and no parallel.deterministic, beside "
            "train.optimizer.moments: host",
            f"trained_dtype={self.model.trained_dtype}, deterministic={self.parallel.deterministic}",
            "Set it, or leave moments at float32.",
        )
        _require(
            self.model.trained_dtype != "bfloat16" or self.model.autocast is None,
            "one dtype of the products",
            f"model.autocast={self.model.autocast} beside model.trained_dtype={self.model.trained_dtype}",
            "Remove model.autocast: products of bfloat16 weights are in bfloat16 as they are.",
        )
        engine_name = self.rollout.engine.name
        _require(
            self.rollout.staleness == 0 or engine_name in ("auto", "transformers", "vllm_server", "recorded"),
            "an engine beside rollout.staleness that samples while the policy is trained: transformers or vllm_server",
            f"rollout.staleness={self.rollout.staleness} with {engine_name}",
            "Set rollout.staleness: 0, or another engine.",
        )
        if isinstance(self.rollout.engine, VllmServerEngineSection) and self.rollout.engine.in_flight:
            way = self.rollout.engine.weights.name
            _require(
                self.rollout.staleness > 0 and way != "adapter",
                "rollout.staleness of at least 1 and weights by folder or nccl for rollout.engine.in_flight",
                f"rollout.staleness={self.rollout.staleness}, weights: {way}",
                "Set them, or leave in_flight out: an adapter has a name of its own for each version.",
            )
        if isinstance(self.rollout.engine, GpuEngineSection):
            _require(
                self.model.layers != "transformers",
                "model.layers: row_invariant or auto under rollout.engine gpu, which decodes through them",
                f"model.layers={self.model.layers}",
                "Set it.",
            )
            backends = (self.train.scoring_backend, self.train.training_backend)
            _require(
                all(backend in ("auto", "fused") for backend in backends),
                "the head's fused backend under rollout.engine gpu, whose log-probs it gives",
                f"train.scoring_backend={backends[0]}, train.training_backend={backends[1]}",
                "Leave both at auto.",
            )
        engine = self.rollout.engine
        if isinstance(engine, VllmServerEngineSection):
            _require(
                engine.api_key_file is None or engine.api_key_variable is None,
                "one place of the API key",
                "api_key_file and api_key_variable",
                "Remove one.",
            )
            _require(
                engine.model is not None or isinstance(self.model.source, str),
                "rollout.engine.model beside a model that is a config",
                "model: null",
                "Name the model as the servers do (--served-model-name).",
            )
            if isinstance(engine.weights, AdapterWeightsSection):
                _require(
                    self.model.lora is not None and self.warm_start is None,
                    "model.lora and no warm_start, which changes the base model, for pushing an adapter alone",
                    "no model.lora" if self.model.lora is None else "a warm_start",
                    "Set rollout.engine.weights: {name: folder}.",
                )
                _require(
                    self.model.lora is None or not self.model.lora.modules_to_save,
                    "an adapter of low-rank factors alone, for vLLM loads no others",
                    f"model.lora.modules_to_save: {list(self.model.lora.modules_to_save if self.model.lora else ())}",
                    "Set rollout.engine.weights: {name: folder}.",
                )
        _require(
            self.model.quantize is None
            or not isinstance(engine, VllmEngineSection | VllmServerEngineSection)
            or isinstance(getattr(engine, "weights", None), AdapterWeightsSection),
            "an engine beside model.quantize that takes the adapter alone, which cannot be merged into four bits",
            f"rollout.engine: {engine.name}",
            "Sample with rollout.engine: {name: transformers}, or push with weights: {name: adapter}.",
        )
        if isinstance(engine, VllmServerEngineSection | VllmEngineSection):
            for sampling in self.samplings:
                sampling_fields(sampling)
        parallel = self.parallel
        _require(
            not parallel.deterministic or (parallel.shard in ("auto", 1) and parallel.sequence == 1),
            "all weights on every process beside parallel.deterministic",
            f"parallel.shard={parallel.shard}, parallel.sequence={parallel.sequence}",
            "Leave both out.",
        )
        if self.rollout.parity.has_threshold:
            _require(
                not self.rollout.sampling.filters_distribution,
                "rollout.sampling from the policy's own softmax beside thresholds of rollout.parity, which compares "
                "log-probs of the same distribution",
                "top-p, top-k, min-p or penalties",
                "Leave rollout.parity out, or those settings.",
            )
            _require(
                self.rollout.staleness == 0,
                "rollout.staleness: 0 beside thresholds of rollout.parity, which compares completions of the weights "
                "that are trained",
                f"rollout.staleness={self.rollout.staleness}",
                "Leave rollout.parity out; rollout.engine.probe compares after every push.",
            )
        if self.algorithm.correction is not None:
            sampling = self.rollout.sampling
            self.algorithm.correction.check_sampling(
                top_p=sampling.top_p,
                top_k=sampling.top_k or 0,
                min_p=sampling.min_p,
                others=sampling.penalties,
            )
        return self


def _require(condition: bool, needed: str, given: str, remedy: str) -> None:
    if not condition:
        raise ConfigurationError(needed=needed, given=given, remedy=remedy)
