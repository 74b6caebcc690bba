"""Load any transformers causal language model and its tokenizer, and check both before a run starts.

Weights come from the safetensors of a hub name or local folder (never from a pickle, which can run code), from a GGUF
file, or at random from a config and a seed. On the meta device there are no weights: enough for a dry run.
"""

import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from difflib import SequenceMatcher, get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from logitless.errors import ConfigurationError, LogitlessError, UnavailableError
from logitless.hub import use_cache_if_unreachable
from logitless.models.end_of_turn import mend_end_token, warn_of_unopened_turn
from logitless.models.four_bit import FourBit, quantize
from logitless.models.gguf import gguf_config, gguf_file, gguf_model, gguf_tokenizer
from logitless.models.lm_head import backbone, causal_lm, check_positions, verify_lm_head, verify_packing
from logitless.models.mixers import RECURRENT, keep_sequences_apart
from logitless.models.modes import runs_compiled
from logitless.models.packed import KINDS, PACKED
from logitless.models.prequantized import DEQUANTIZED, check_quantization, make_plain, take_quantization
from logitless.models.rotary import separate_long_sequences
from logitless.models.seeded import seeded
from logitless.models.text_half import IMAGE_MODELS, KEY_MAPPING, conversions_of, text_half

logger = logging.getLogger("logitless")

Attention = Literal["packed", "sdpa", "eager", "flex_attention"]
ModelSource = str | Path | Mapping[str, Any]


def load_model(
    source: ModelSource,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attention: Attention = "packed",
    trust_remote_code: bool = False,
    random_weights: bool = False,
    seed: int = 0,
    four_bit: FourBit | None = None,
    empty: bool = False,
) -> PreTrainedModel:
    """Load a causal language model and verify its LM head and its packing.

    Args:
        source: hub name, local folder, ``config.json`` file, GGUF file (a path, or ``owner/name/file.gguf`` of the
            hub), or a mapping with ``model_type`` and the config's fields.
        dtype: of the weights.
        device: where the model ends up; on ``meta`` only shapes exist.
        attention: ``packed`` (ours, no mask is built) or one of transformers', packed by a block-diagonal mask.
        trust_remote_code: run code that the model repository ships.
        random_weights: initialize the weights at random instead of reading them.
        seed: of the random weights; the global generators are left alone.
        four_bit: quantize the decoder's linear layers to four bits, one at a time as they move to the device; for a
            frozen base model.
        empty: leave the weights on ``meta``, unread, and put everything else on the CPU; for a process that gets the
            weights from another one.

    Raises:
        ConfigurationError: the source does not exist, has no safetensors, or lacks weights.
        UnavailableError: the architecture cannot run with this attention, has recurrent layers whose packed sequences
            cannot be kept apart, its LM head is not an LMHead, or bitsandbytes is missing for ``four_bit``.

    Example:
        >>> config = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
        ...           "num_attention_heads": 1, "vocab_size": 11}
        >>> load_model(config, random_weights=True, seed=1).num_parameters()
        840
    """
    whole = _load_config(source, trust_remote_code)
    quantization = take_quantization(whole)
    config = text_half(whole)
    _check_language_model(config)
    _check_attention_softcap(config, attention)
    _check_temperature(config, attention)
    _check_attention_of_transformers(config, attention)
    options: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": PACKED if attention == "packed" else attention,
        "trust_remote_code": trust_remote_code,
    }
    if attention == "packed":
        _check_attention_interface(config)
    if dtype == torch.float64:
        options["experts_implementation"] = "eager"  # torch's grouped products take no float64
    meta = torch.device(device).type == "meta"
    if isinstance(source, Mapping) and not random_weights:
        raise ConfigurationError(
            needed="weights for the model",
            given="a config only",
            remedy="Set random_weights, or give the folder or hub name of a trained model.",
        )
    if quantization is not None and not random_weights:
        check_quantization(quantization, source)
    if empty:
        model = _without_weights(source, config, options, reads=not random_weights)
    elif random_weights or meta:
        with seeded(seed), torch.device("meta" if meta else "cpu"):
            model = _built(config, options)
    else:
        model = _read_weights(source, config, options, whole, quantization)
    if four_bit is None and not empty:
        model.to(device)
    separate_long_sequences(model)
    check_positions(backbone(model))
    _check_recurrence(model, keep_sequences_apart(model))
    verify_lm_head(model)
    verify_packing(model)
    if four_bit is not None:  # after the checks: four-bit products differ by more than their tolerance
        quantize(model, four_bit, torch.device(device))
        model.to(device)
    return model


def stored_dtype(source: ModelSource, *, trust_remote_code: bool = False) -> torch.dtype | None:
    """The dtype of the weights in a model's files, by its config; None if it has none, or they are quantized.

    Weights that are loaded to the CPU in this dtype are the files, mapped into memory, and not a copy.
    """
    config = _load_config(source, trust_remote_code)
    return None if take_quantization(config) is not None else getattr(config, "dtype", None)


def load_tokenizer(source: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer, which must have an EOS token; a pad token is not needed.

    If the chat template ends its turns with another token, that becomes the EOS token (``mend_end_token``).

    Args:
        source: hub name, local folder, or GGUF file.
        trust_remote_code: run code that the repository ships.

    Raises:
        ConfigurationError: the source does not exist, the tokenizer has no EOS token, or turns of the chat template end
            with text that is not a token.

    Example:
        >>> import tempfile
        >>> from logitless.models.char_tokenizer import character_tokenizer
        >>> folder = tempfile.mkdtemp()
        >>> _ = character_tokenizer("abc").save_pretrained(folder)
        >>> load_tokenizer(folder).eos_token
        '<eos>'
    """
    gguf = gguf_file(source)
    if gguf is None:
        _check_path(source)
    offline = gguf is None and not Path(source).expanduser().exists() and use_cache_if_unreachable()
    try:
        if gguf is not None:
            tokenizer = gguf_tokenizer(gguf)
        else:
            tokenizer = AutoTokenizer.from_pretrained(str(source), trust_remote_code=trust_remote_code)
    except LogitlessError:
        raise
    except Exception as error:  # the tokenizers library raises no class of its own
        raise ConfigurationError(
            needed="a tokenizer",
            given=_not_cached(source) if offline else f"{str(source)!r}: {_first_line(error)}",
            remedy="Set model.tokenizer to its folder or hub name; the hub must be reachable or it in the cache.",
        ) from error
    mend_end_token(tokenizer, repr(str(source)))
    if tokenizer.eos_token_id is None:
        raise ConfigurationError(
            needed="a tokenizer with an EOS token, so that completions can end",
            given=f"none in {str(source)!r}",
            remedy='Set model.tokenizer to a folder whose tokenizer_config.json has "eos_token".',
        )
    warn_of_unopened_turn(tokenizer, repr(str(source)))
    return tokenizer


def check_vocabulary(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ConfigurationError for a tokenizer with ids that the model has no embedding for.

    The model may have more rows than the tokenizer has ids.
    """
    rows = causal_lm(model).get_input_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values())
    if largest >= rows:
        raise ConfigurationError(
            needed=f"token ids below the model's {rows} embedding rows",
            given=f"a tokenizer with ids up to {largest}",
            remedy=f"Use the model's own tokenizer, or a model with vocab_size >= {largest + 1}.",
        )


def disable_dropout(model: nn.Module) -> int:
    """Set every dropout probability of a model to 0, in its modules and its config; returns how many were not.

    The noise on routers' inputs (Mixtral's ``router_jitter_noise``) becomes 0 too. With either, the importance ratio
    of the first step would not be 1.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
        >>> disable_dropout(model), model[1].p
        (1, 0.0)
    """
    owners: list[Any] = []
    for module in model.modules():
        owners.append(module)
        config = getattr(module, "config", None)
        if config is not None and all(config is not owner for owner in owners):
            owners.append(config)
    changed = 0
    for owner in owners:
        noisy = [name for name in vars(owner) if "drop" in name or "jitter_noise" in name]
        names = ["p"] if isinstance(owner, nn.modules.dropout._DropoutNd) else noisy
        for name in names:
            value = getattr(owner, name)
            if isinstance(value, float) and value > 0:
                setattr(owner, name, 0.0)
                changed += 1
    return changed


def compile_layers(model: nn.Module, *, backend: str = "inductor") -> int:
    """``torch.compile`` each decoder layer in place; returns how many.

    Layers share their code, so torch compiles only twice: for the first row's shape, then for any shape. Packed
    attention is a kernel of its own and is not compiled. Raises UnavailableError if the architecture does not mark its
    layers.
    """
    layers = [module for module in backbone(model).modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UnavailableError(
            needed="decoder layers to compile", given=type(causal_lm(model)).__name__, remedy="Switch compile off."
        )
    for layer in layers:
        layer.compile(backend=backend)
        layer._compiled_call_impl = partial(_call, layer._call_impl, layer._compiled_call_impl)
    return len(layers)


def _call(plain: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return (compiled if runs_compiled() else plain)(*args, **kwargs)


def _load_config(source: ModelSource, trust_remote_code: bool) -> Any:
    offline = False
    try:
        if isinstance(source, Mapping):
            fields = dict(source)
            kind = fields.pop("model_type")
            if kind not in CONFIG_MAPPING:
                raise ConfigurationError(
                    needed="a model that transformers knows",
                    given=f"model_type {kind!r}" + _nearest(kind, CONFIG_MAPPING),
                    remedy="Give a known model_type, a local folder or a hub name.",
                )
            config = AutoConfig.for_model(kind, **fields)
            _check_names(type(config), fields)
            _check_heads(config.get_text_config())
            return config
        gguf = gguf_file(source)
        if gguf is not None:
            return gguf_config(gguf)
        _check_path(source)
        offline = not Path(source).expanduser().exists() and use_cache_if_unreachable()
        return AutoConfig.from_pretrained(str(source), trust_remote_code=trust_remote_code)
    except KeyError as error:
        raise ConfigurationError(
            needed="a model_type in the model's config",
            given=f"keys {sorted(source) if isinstance(source, Mapping) else source}",
            remedy='Add for example "model_type: llama".',
        ) from error
    except LogitlessError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        shown = dict(source) if isinstance(source, Mapping) else str(source)
        raise ConfigurationError(
            needed="a model that transformers knows",
            given=_not_cached(source) if offline else f"{shown!r}: {_in_one_line(error)}",
            remedy="Give a local folder, a reachable hub name, or a config with a known model_type; "
            "set trust_remote_code if the repository ships its own code.",
        ) from error


def _check_names(kind: Any, fields: Mapping[str, Any]) -> None:
    """Refuse a field that is a known one but for one misspelt word.

    transformers keeps every name, and some models read names that their configs do not list.
    """
    known = {*kind().to_dict(), *getattr(kind, "attribute_map", ()), *inspect.signature(kind).parameters}
    for name in fields:
        near = [] if name in known or hasattr(kind, name) else [each for each in known if _is_misspelt(name, each)]
        if near:
            raise ConfigurationError(
                needed=f"names that the config of a {kind.model_type} has",
                given=f"{name!r} (nearest: {min(near)!r})",
                remedy="Correct the name, or leave it out.",
            )


def _check_heads(config: Any) -> None:
    """Refuse heads of which transformers makes layers that fail at their first token, on ``meta`` not even there."""
    fields = vars(config)  # of configs with another one for each layer, getattr raises
    heads, key_heads = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(key_heads, int) and (key_heads < 1 or heads % key_heads):
        raise ConfigurationError(
            needed="num_attention_heads that is a multiple of num_key_value_heads",
            given=f"{heads} and {key_heads}",
            remedy="Correct one of them.",
        )
    rope, width = fields.get("rope_parameters"), fields.get("qk_rope_head_dim") or fields.get("head_dim")
    if rope and "partial_rotary_factor" not in rope and isinstance(width, int) and width % 2:
        raise ConfigurationError(
            needed="an even head_dim, for rotary embeddings turn pairs",
            given=f"{width}, with hidden_size {config.hidden_size} and num_attention_heads {heads}",
            remedy="Set head_dim, or a hidden_size that is an even multiple of num_attention_heads.",
        )


def _is_misspelt(name: str, known: str) -> bool:
    """Whether the names differ in one word, by a letter or two.

    Example:
        >>> _is_misspelt("hidden_sise", "hidden_size"), _is_misspelt("n_shared_experts", "n_routed_experts")
        (True, False)
    """
    one, other = name.split("_"), known.split("_")
    different = [pair for pair in zip(one, other, strict=False) if pair[0] != pair[1]]
    return len(one) == len(other) and len(different) == 1 and SequenceMatcher(None, *different[0]).ratio() > 0.7


def _nearest(name: Any, known: Iterable[str]) -> str:
    near = get_close_matches(str(name), known, n=1, cutoff=0.8)
    return f" (nearest: {near[0]!r})" if near else ""


def _built(config: Any, options: Mapping[str, Any]) -> PreTrainedModel:
    """A model with new weights, from a config."""
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)
    except Exception as error:  # an architecture can raise anything for a bad config
        raise ConfigurationError(
            needed=f"a config that a model of type {config.model_type} can be built from",
            given=f"{type(error).__name__}: {_in_one_line(error)}",
            remedy="Check the sizes in model.source against a config of a published model of this type.",
        ) from error
    empty = next((name for name, parameter in model.named_parameters() if not parameter.numel()), None)
    if empty is not None:
        raise ConfigurationError(
            needed="a config with sizes of at least 1",
            given=f"one that makes {empty} empty",
            remedy="Check the sizes in model.source.",
        )
    return model


def _without_weights(source: ModelSource, config: Any, options: Mapping[str, Any], *, reads: bool) -> PreTrainedModel:
    """The model with every parameter on ``meta``; its buffers and generation config are as with weights."""
    plain = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # if tied: already replaced
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        plain(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[assignment, method-assign]
    try:
        with seeded(0):
            model = _built(config, options)
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]
    if reads:
        with suppress(OSError):  # without such a file the one made from the config stays
            model.generation_config = GenerationConfig.from_pretrained(str(source))
    return model


def _not_cached(source: object) -> str:
    return f"{str(source)!r}, which is no folder here, not in the cache, and the hub cannot be reached"


def _check_path(source: str | Path) -> None:
    """A source that looks like a path must exist: a hub name is ``name`` or ``owner/name``."""
    path = Path(source).expanduser()
    looks_local = isinstance(source, Path) or str(source).startswith((".", "/", "~")) or str(source).count("/") > 1
    if looks_local and not path.exists():
        raise ConfigurationError(
            needed="an existing folder of a model or tokenizer",
            given=f"{str(source)!r}, which does not exist",
            remedy="Correct the path, which in a recipe starts at its folder: copy what it names along with a recipe "
            "(`logitless recipes copy` does); or give a hub name such as Qwen/Qwen2.5-0.5B-Instruct.",
        )
    if (path / "config.yaml").exists() and not (path / "config.json").exists():
        raise ConfigurationError(
            needed="the folder of a model",
            given=f"{str(source)!r}, the folder of a run",
            remedy=f"Take {path / 'model'}, which a finished run has; `logitless export` makes one of a checkpoint.",
        )


def _check_recurrence(model: PreTrainedModel, num_kept_apart: int) -> None:
    """Refuse layers whose recurrent state would pass from one packed sequence into the next."""
    config = model.config.get_text_config()
    kinds = list(getattr(config, "layer_types", None) or ())
    recurrent = [kind for kind in kinds if kind in RECURRENT]
    carries = len(recurrent) > num_kept_apart or (getattr(model, "_is_stateful", False) and not num_kept_apart)
    if carries:
        raise UnavailableError(
            needed="layers whose packed sequences can be kept apart: attention, or a convolution over time that begins"
            " a recurrent layer",
            given=f"{config.model_type}, with other {', '.join(sorted(set(recurrent))) or 'state-space'} layers that"
            " carry a state from token to token",
            remedy="Use another model: docs/models.md says which are tested.",
        )


def _check_attention_softcap(config: Any, attention: Attention) -> None:
    """Refuse SDPA for attention with a softcap, which it silently ignores."""
    cap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if cap is not None and attention == "sdpa":
        raise UnavailableError(
            needed=f"attention with a softcap of {cap}",
            given=f"attention {attention!r}, which has none",
            remedy='Leave attention at "packed", or set it to "eager" or "flex_attention".',
        )


def _check_temperature(config: Any, attention: Attention) -> None:
    """Refuse other attention for Llama 4, whose queries are scaled by position: only ours restarts it per sequence."""
    if getattr(config.get_text_config(), "attn_temperature_tuning", False) and attention != "packed":
        raise UnavailableError(
            needed="attention that knows each token's place in its sequence (attn_temperature_tuning)",
            given=f"attention {attention!r}",
            remedy='Leave attention at "packed".',
        )


def _check_attention_of_transformers(config: Any, attention: Attention) -> None:
    """Refuse attention that transformers does not have for an architecture (gpt-oss has no SDPA, for its sinks)."""
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    flag = {"sdpa": "_supports_sdpa", "flex_attention": "_supports_flex_attn"}.get(attention)
    if kind is not None and flag is not None and not getattr(kind, flag):
        raise UnavailableError(
            needed=f"attention that transformers has for {config.model_type}",
            given=f"attention {attention!r}",
            remedy='Leave attention at "packed"; where that is refused too, set it to "eager".',
        )


def _check_language_model(config: Any) -> None:
    known = type(config) in AutoModelForCausalLM._model_mapping or getattr(config, "auto_map", None)
    if hasattr(config, "vision_config") and not known:
        raise UnavailableError(
            needed=f"a language model, or an image model among {', '.join(sorted(IMAGE_MODELS))}, whose language model "
            "is loaded alone",
            given=config.model_type,
            remedy="Save its language model by itself, as a causal language model of transformers.",
        )


def _check_attention_interface(config: Any) -> None:
    unknown = set(getattr(config.get_text_config(), "layer_types", None) or ()) - KINDS
    if unknown:
        raise UnavailableError(
            needed="causal attention: full, in chunks, or with a window",
            given=f"{', '.join(sorted(unknown))} in {config.model_type}, with attention 'packed'",
            remedy='Set attention to "sdpa" or "eager", which are checked as the model is loaded.',
        )
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if kind is None or kind._supports_attention_backend:
        return
    if not hasattr(sys.modules[kind.__module__], "ALL_ATTENTION_FUNCTIONS"):  # its layers would not use ours
        raise UnavailableError(
            needed="an architecture with replaceable attention",
            given=f"{kind.__name__} with attention 'packed'",
            remedy='Set attention to "sdpa" or "eager".',
        )


def positions(config: Any) -> int | None:
    """Number of positions of a model, a scaled rotary embedding's included; None if there is no limit."""
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    rope = getattr(config, "rope_parameters", None)
    scaled = 0.0
    if isinstance(rope, dict) and isinstance(rope.get("factor"), int | float):
        scaled = rope["factor"] * (rope.get("original_max_position_embeddings") or limit)
    return max(limit, int(scaled))


def _read_weights(
    source: ModelSource, config: Any, options: Mapping[str, Any], whole: Any, quantization: dict[str, Any] | None
) -> PreTrainedModel:
    """The model of ``config`` with weights from files of ``whole``: the same config, or that of an image model."""
    of_image_model = whole is not config
    if quantization is not None:
        method = DEQUANTIZED[quantization["quant_method"]]
        logger.info("model: its weights are stored in %s and dequantized; the run trains and saves plain ones", method)
        config.quantization_config = {**quantization, "dequantize": True}
    folder, gguf = Path(str(source)).expanduser(), gguf_file(source)
    if gguf is None and (folder.is_file() or (folder.is_dir() and not list(folder.glob("*.safetensors")))):
        pickles = sorted(path.name for path in folder.glob("*.bin")) if folder.is_dir() else []
        raise ConfigurationError(
            needed="weights as *.safetensors",
            given=f"{str(source)!r} with {pickles[0] if pickles else 'a config only'}",
            remedy="Convert the weights to safetensors (a pickle can run code)."
            if pickles
            else "Set random_weights, or give the folder of a trained model.",
        )
    try:
        if gguf is not None:
            model, report = gguf_model(gguf, config, dict(options))
        else:
            names = {"key_mapping": KEY_MAPPING} if of_image_model else {}
            with conversions_of(whole, config) if of_image_model else nullcontext():
                model, report = AutoModelForCausalLM.from_pretrained(
                    str(source), config=config, use_safetensors=True, output_loading_info=True, **names, **options
                )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigurationError(
            needed="readable weights as safetensors or GGUF",
            given=f"{str(source)!r}: {_first_line(error)}",
            remedy="Check the folder or hub name; weights that exist only as .bin must be converted to safetensors.",
        ) from error
    absent = sorted(report["missing_keys"])
    if absent:
        raise ConfigurationError(
            needed="weights for every parameter",
            given=f"{str(source)!r} without {', '.join(map(str, absent[:5]))}{' ...' if len(absent) > 5 else ''}",
            remedy="Give a checkpoint of a causal language model of this architecture.",
        )
    if of_image_model or quantization is not None:
        make_plain(model, options["dtype"])
    if of_image_model:
        logger.info(
            "image model: its language model is loaded as %s, %d tensors of its image tower are left out",
            config.model_type,
            len(report["unexpected_keys"]),
        )
    return model


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
