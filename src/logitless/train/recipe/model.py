"""The section ``model``: which model is trained, and how it is held in memory."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from logitless.train.recipe.rule import Rule, Setting, chosen, given, needs_gpu, needs_package, needs_whole_weights
from logitless.train.recipe.section import Section

if TYPE_CHECKING:
    from logitless.train.recipe.config import Recipe


class LoraSection(Section):
    """Train low-rank factors on a frozen base model; the reference is the base model with the adapter off."""

    rank: PositiveInt = Field(16, description="R, rank of the factors")
    alpha: PositiveFloat = Field(32.0, description="the factors' product is scaled by alpha / rank")
    targets: tuple[str, ...] | Literal["all-linear"] = Field(
        "all-linear",
        description="module names to adapt; of a mixture also expert weights (gate_up_proj, down_proj), each expert "
        "with factors of its own, and routers (gate); all-linear: all but the LM head and routers",
    )
    use_rslora: bool = Field(False, description="scale by alpha / sqrt(rank) instead")
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="of the factors' inputs, in training passes alone; `logp_old` then has a pass of its own, and "
        "neither row-invariant layers nor the GPU engine run",
    )
    modules_to_save: tuple[str, ...] = Field(
        (),
        description="ends of names of modules to train whole, such as lm_head, embed_tokens, norm; `trained_dtype` "
        "must be `dtype`. Row-invariant layers run with lm_head alone; vLLM takes no such adapter",
    )


class RouterSection(Section):
    """How the routers of a mixture of experts are trained."""

    loss: NonNegativeFloat | Literal["config"] | None = Field(
        "config",
        description="coefficient of the load-balancing loss (docs/objectives.md); config: `router_aux_loss_coef` where "
        "the model's config has `output_router_logits: true`, else 0. Above 0 zero-advantage completions are read too",
    )
    frozen: bool = Field(False, description="train no router")


class ModelSection(Section):
    """Which model is trained, and how it is held in memory."""

    source: str | dict[str, Any] = Field(
        description="hub name, folder, GGUF file, or a transformers config as a mapping"
    )
    random_weights: bool = Field(False, description="build the model from its config with seeded random weights")
    tokenizer: str | None = Field(None, description="hub name, folder or GGUF file; default: `source`")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="variables of the chat template, for example `enable_thinking: false` (Qwen3), in training, "
        "evaluation, environments, `sample` and `serve-engine`",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="of frozen weights (LoRA's base, the reference); auto: as `trained_dtype`, float32 on a CPU"
    )
    trained_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="of trained weights; under bfloat16 the optimizer holds float32 master weights; auto: bfloat16 on "
        "a GPU that computes in it and without model.autocast, else float32 (docs/numerics.md)",
    )
    autocast: Literal["bfloat16"] | None = Field(None, description="dtype of the products in forward and backward")
    attention: Literal["packed", "sdpa", "eager", "flex_attention"] = Field(
        "packed", description="packed: own packed attention; the others: transformers' with a block-diagonal mask"
    )
    layers: Literal["auto", "transformers", "row_invariant"] = Field(
        "auto",
        description="row_invariant: fused and bitwise identical in any batch, on a GPU (docs/bits.md); auto: these "
        "where they serve a model in 16 bits, else transformers' own",
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, ...")
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward")
    compile: bool = Field(False, description="torch.compile the decoder's layers")
    router: RouterSection = RouterSection()
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
        description="nf4: LoRA's base in four bits, by bitsandbytes, without bitwise promises or merging; None: in "
        "`dtype`",
    )

    @property
    def activation_bytes(self) -> int:
        """Bytes of a number in activations, which have the dtype of the products."""
        half = self.autocast is not None or self.trained_dtype != "float32"
        return 2 if half or (self.lora is not None and self.dtype != "float32") else 4


# --- rules ----------------------------------------------------------------------------------------------------------

row_invariant = Setting[ModelSection](
    "model.layers row_invariant", lambda section: section.layers == "row_invariant", of="model."
)
ROW_INVARIANT = (
    row_invariant.keeps("model.attention", "packed"),
    row_invariant.excludes(
        "model.autocast",
        ", for their products have the dtype of the weights",
        remedy="Leave model.autocast out: weights in bfloat16 give products in it.",
    ),
    row_invariant.excludes("model.compile"),
    row_invariant.excludes(
        "model.quantize",
        ", whose products are not bitwise identical",
        remedy="Leave model.quantize out where the GPU holds the base in 16 bits.",
    ),
    row_invariant.needs(
        "no model.lora.dropout",
        holds=lambda section: section.lora is None or section.lora.dropout == 0,
        given=lambda _: "dropout in an adapter",
        remedy="Leave model.lora.dropout out.",
    ),
    row_invariant.needs(
        "no model.lora.modules_to_save but lm_head",
        holds=lambda section: section.lora is None or {*section.lora.modules_to_save} <= {"lm_head"},
        given=lambda _: "modules of the decoder that are trained whole beside adapters",
        remedy="Leave model.lora.modules_to_save out.",
    ),
)
"""What row-invariant layers need of this section; assembly/layers.py has what they need of model and machine."""


def _model(recipe: "Recipe") -> ModelSection:
    return recipe.model


quantize = given("model.quantize")
layers = row_invariant.on(_model)
lora = given("model.lora")
flex = chosen("model.attention", "flex_attention")

RULES: tuple[Rule["Recipe"], ...] = (
    Setting["Recipe"]("model.dtype", lambda recipe: recipe.model.dtype not in ("auto", "float32")).needs(
        "frozen weights: LoRA's base, or a reference model",
        holds=lambda recipe: recipe.model.lora is not None or recipe.reads_reference,
        given=lambda recipe: f"{recipe.model.dtype} with full fine-tuning and no kl",
        remedy="Leave it out, or set model.autocast to make products in bfloat16.",
    ),
    chosen("model.trained_dtype", "bfloat16").excludes(
        "model.autocast",
        ", for the products have the dtype of the weights",
        remedy="Leave model.autocast out: products of bfloat16 weights are in bfloat16 as they are.",
    ),
    given("model.lora.modules_to_save").needs(
        "one dtype of the base model and of these modules, which stand between its layers",
        holds=lambda recipe: (
            recipe.model.trained_dtype == recipe.model.dtype
            or "auto" in (recipe.model.trained_dtype, recipe.model.dtype)
        ),
        given=lambda recipe: f"model.dtype: {recipe.model.dtype}, model.trained_dtype: {recipe.model.trained_dtype}",
        remedy="Set both alike, or leave both at auto.",
    ),
    quantize.requires(
        "model.lora",
        ", for weights in four bits are not trained",
        remedy="Set model.lora: {}, or leave model.quantize out.",
    ),
    quantize.excludes("warm_start", ", whose adapter would be merged into the base", remedy="Leave one of them out."),
    quantize.needs(
        "a rollout.engine other than vLLM, or one that takes the adapter alone, for four bits cannot be merged into",
        holds=lambda recipe: not recipe.rollout.engine.is_vllm or recipe.rollout.engine.takes_adapters,
        given=lambda recipe: f"rollout.engine: {recipe.rollout.engine.name}",
        remedy="Sample with rollout.engine: {name: transformers}, or push with weights: {name: adapter}.",
    ),
    *(rule.on(_model) for rule in ROW_INVARIANT),
)

WHOLE_LAYERS = needs_whole_weights(
    layers,
    "",
    "Set parallel.replicate to the number of processes, or leave model.layers at auto, and sample with "
    "rollout.engine: {name: vllm_server}.",
)

PROCESS_RULES = (
    WHOLE_LAYERS,
    needs_whole_weights(
        quantize,
        ", for four bits are not cut",
        "Set parallel.replicate to the number of processes, or leave model.quantize out.",
    ),
)

MACHINE_RULES = (
    needs_gpu(layers, "a GPU and Triton", "model.layers=transformers", kernels=True),
    needs_gpu(flex, "a GPU for its backward", "model.attention=packed"),
    needs_package(quantize, "bitsandbytes", "four-bit", "model.quantize=null"),
    needs_package(lora, "peft", "lora", None),
)
