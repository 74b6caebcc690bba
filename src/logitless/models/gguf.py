"""A model and its tokenizer from one GGUF file (the format of llama.cpp), dequantized to plain weights.

The tokenizer is built here from the file's metadata. The conversion of transformers makes ``bos`` the end token, drops
the pad token and always splits white space as GPT-2 does. Not supported: sentencepiece vocabularies, and byte-level
ones whose pre-tokenizer is not in ``_SPLITS``.
"""

import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from logitless.errors import ConfigurationError
from logitless.hub import use_cache_if_unreachable
from logitless.installed import optional
from logitless.models.prequantized import make_plain

logger = logging.getLogger("logitless")

_CONTROL, _USER_DEFINED, _UNKNOWN = 3, 4, 2  # of tokenizer.ggml.token_type


@dataclass(frozen=True)
class _Splitting:
    """How a byte-level tokenizer splits a text before its merges."""

    pre_tokenizer: Callable[[], Any]
    normalizer: Callable[[], Any] | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


def _bytes(*, use_regex: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _by_pattern(digits: str) -> Callable[[], Any]:
    """The split of Llama 3 and Qwen 2, which differ in ``digits``, the pattern of digits that stay together."""
    pattern = (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), _bytes(use_regex=False)]
    )


_SPLITS = {
    "gpt-2": _Splitting(lambda: _bytes(use_regex=True)),
    # Digits are split off first, so white space before a digit stays a token of its own.
    "smollm": _Splitting(
        lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _bytes(use_regex=True)])
    ),
    "qwen2": _Splitting(_by_pattern(r"\p{N}"), normalizers.NFC),
    "llama-bpe": _Splitting(_by_pattern(r"\p{N}{1,3}"), ignore_merges=True, adds_bos=True),
}


def gguf_file(source: object) -> Path | None:
    """The GGUF file that a model's source names; ``owner/name/file.gguf`` is downloaded from the hub.

    Returns:
        Its path; None if the source is not a GGUF file.

    Raises:
        ConfigurationError: there is no such file.
    """
    name = str(source)
    if not isinstance(source, str | Path) or not name.endswith(".gguf"):
        return None
    path = Path(name).expanduser()
    if path.is_file():
        return path
    owner, _, rest = name.partition("/")
    repository, _, inner = rest.partition("/")
    if not inner or name.startswith((".", "/", "~")):
        raise ConfigurationError(
            needed="a GGUF file",
            given=f"{name!r}, which does not exist",
            remedy="Correct the path, or name a file of the hub: owner/name/file.gguf.",
        )
    from huggingface_hub import hf_hub_download

    use_cache_if_unreachable()
    try:
        return Path(hf_hub_download(f"{owner}/{repository}", inner))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            needed="a GGUF file",
            given=f"{name!r}, neither here nor on the hub or in its cache: {str(error).strip().splitlines()[0]}",
            remedy="Correct the path, or name a file of the hub: owner/name/file.gguf.",
        ) from error


def gguf_config(path: Path) -> Any:
    """The model's config, from the metadata of a GGUF file.

    Raises:
        ConfigurationError: the file is damaged, or of an architecture that transformers does not read.
        UnavailableError: the package gguf is absent.
    """
    _need_package()
    try:
        file = path.stat()
        return deepcopy(_config(path, file.st_mtime_ns, file.st_size))
    except Exception as error:  # a damaged file can raise anything
        raise ConfigurationError(
            needed="a GGUF file of an architecture that transformers reads",
            given=f"{str(path)!r}: {type(error).__name__}: {' '.join(str(error).split())}",
            remedy="Get the file again, or give the model as a folder with safetensors.",
        ) from error


@lru_cache(maxsize=4)
def _config(path: Path, *_of_file: int) -> Any:
    """Cached, because each read goes through the whole vocabulary, which takes seconds."""
    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    if hasattr(config, "moe_intermediate_size"):  # transformers leaves the width of Qwen 3's experts at its default
        from gguf import GGUFReader

        width = _of_architecture(GGUFReader(path).fields, "expert_feed_forward_length")
        config.moe_intermediate_size = width or config.moe_intermediate_size
    return config


def gguf_model(path: Path, config: Any, options: dict[str, Any]) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model of a GGUF file with plain weights, and transformers' report of missing weights.

    Args:
        path: of the file.
        config: from ``gguf_config``.
        options: further arguments of ``from_pretrained``.
    """
    from transformers import GgufConfig

    logger.info("model: %s is dequantized; the run trains and saves plain weights", path.name)
    model, report = AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        config=config,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
        **options,
    )
    make_plain(model, options["dtype"])
    model.name_or_path = model.config.name_or_path = str(path)  # transformers names the folder; an adapter, its base
    return model, report


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Build the tokenizer that a GGUF file's metadata describe.

    Raises:
        ConfigurationError: the file is damaged, or describes a tokenizer that cannot be built exactly.
        UnavailableError: the package gguf is absent.
    """
    _need_package()
    found = _metadata(path)
    kind, pre = found.get("model"), found.get("pre", "gpt-2")
    if kind != "gpt2" or pre not in _SPLITS or not {"tokens", "token_type", "merges"} <= found.keys():
        raise ConfigurationError(
            needed=f"a byte-level tokenizer in {path.name} that splits texts as one of {', '.join(_SPLITS)}",
            given=f"tokenizer.ggml.model {kind!r}, tokenizer.ggml.pre {pre!r}",
            remedy="Set model.tokenizer to the folder or hub name of the model's own tokenizer.",
        )
    splitting, tokens = _SPLITS[pre], found["tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in found["merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    inner = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=splitting.ignore_merges))
    inner.pre_tokenizer = splitting.pre_tokenizer()
    inner.decoder = decoders.ByteLevel()
    if splitting.normalizer is not None:
        inner.normalizer = splitting.normalizer()
    for token, token_type in zip(tokens, found["token_type"], strict=True):
        if token_type in (_CONTROL, _UNKNOWN):
            inner.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token_type == _USER_DEFINED:
            inner.add_tokens([AddedToken(token, normalized=False)])

    def named(name: str) -> str | None:
        index = found.get(f"{name}_token_id")
        return tokens[index] if index is not None and index < len(tokens) else None

    bos, eos, pad = named("bos"), named("eos"), named("padding")
    if found.get("add_bos_token", splitting.adds_bos) and bos is not None:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, vocabulary[bos])]
        )
    logger.info(
        "tokenizer: built from the metadata of %s: split as %s, end token %s, pad token %s",
        *(path.name, pre, eos, pad if pad is not None else f"{eos}, for the file names none"),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=bos,
        eos_token=eos,
        unk_token=named("unknown"),
        pad_token=eos if pad is None else pad,
        chat_template=found.get("chat_template"),
        model_max_length=found["context_length"],
        clean_up_tokenization_spaces=False,
    )


def _metadata(path: Path) -> dict[str, Any]:
    """A file's metadata on its tokenizer, by name without ``tokenizer.ggml.``, and its ``context_length``."""
    from gguf import GGUFReader

    try:
        fields = GGUFReader(path).fields
        found = {
            name.removeprefix("tokenizer.").removeprefix("ggml."): field.contents()
            for name, field in fields.items()
            if name.startswith("tokenizer.")
        }
        length = _of_architecture(fields, "context_length")
    except Exception as error:  # a damaged file can raise anything: struct, Unicode, memory map, missing keys
        raise ConfigurationError(
            needed="a GGUF file", given=f"{str(path)!r}: {type(error).__name__}: {error}", remedy="Get the file again."
        ) from error
    return found | {"context_length": int(1e30) if length is None else length}


def _of_architecture(fields: Mapping[str, Any], name: str) -> Any:
    """A number of the model, whose key begins with its architecture; None if the file lacks it."""
    field = fields.get(f"{fields['general.architecture'].contents()}.{name}")
    return None if field is None else field.contents()


def _need_package() -> None:
    optional("gguf", extra="gguf", needed="the package gguf, to read a GGUF file")
