"""The language model inside an image model: its config, and the names of its weights.

Text without images uses the language model only, so an image model is loaded and saved as a plain language model,
without its image tower. Qwen's three-part positions are equal for text: their rotary embedding is the plain one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, conversion_mapping

IMAGE_MODELS = {
    "gemma3", "gemma4", "internvl", "lfm2_vl", "llama4", "llava", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl",
    "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe",
}  # fmt: skip
"""transformers' names of image models whose language model is loaded alone; tests hold each to the whole model."""

_SAME_AS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Text configs of image models without a causal LM class of their own, and the equal architecture that has one."""

KEY_MAPPING = {
    r"^(?:model\.)?language_model\.(?:model\.)?(?!lm_head|model\.)": "model.",
    r"^(?:model\.)?language_model\.lm_head": "lm_head",
}
"""Weight names in image models' files (patterns, for any version of transformers) and the language model's names."""

_ALWAYS: dict[str, dict[str, Any]] = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
"""Config fields of the equal architecture that are fixed in the text model."""

_OF_IMAGES = ("mrope_section", "mrope_interleaved", "type")


def text_half(config: Any) -> Any:
    """The config of the language model of an image model; every other config as it is.

    Args:
        config: of transformers.

    Example:
        >>> from transformers import Qwen3VLConfig
        >>> text_half(Qwen3VLConfig()).model_type
        'qwen3'
    """
    if config.model_type not in IMAGE_MODELS:
        return config
    text = config.text_config
    kind = _SAME_AS.get(text.model_type, text.model_type)
    fields = {name: value for name, value in text.to_dict().items() if name not in ("model_type", "architectures")}
    fields["tie_word_embeddings"] = config.tie_word_embeddings
    if fields.get("dtype") is None:
        fields["dtype"] = getattr(config, "dtype", None)
    if kind != text.model_type:
        rope = fields.get("rope_parameters") or {}
        fields["rope_parameters"] = {name: value for name, value in rope.items() if name not in _OF_IMAGES}
        fields |= _ALWAYS.get(text.model_type, {})
    return AutoConfig.for_model(kind, **fields)


@contextmanager
def conversions_of(image_model: Any, text: Any) -> Iterator[None]:
    """Inside, weights of a language model are converted as those of the image model that its files are of.

    Qwen3-VL's experts lie transposed in its files, those of Qwen3 do not.

    Args:
        image_model: config of the files.
        text: its ``text_half``.
    """
    name = AutoModelForCausalLM._model_mapping[type(text)].__name__
    conversions = conversion_mapping.get_checkpoint_conversion_mapping(image_model.model_type)
    if image_model.text_config.model_type not in _SAME_AS or conversions is None:
        yield
        return
    conversion_mapping.register_checkpoint_conversion_mapping(name, conversions, overwrite=True)
    try:
        yield
    finally:
        conversion_mapping.USER_REGISTERED_MAPPINGS.discard(name)
        del conversion_mapping._checkpoint_conversion_mapping_cache[name]
