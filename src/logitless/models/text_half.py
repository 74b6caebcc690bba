"""Loads only the language model of a vision-language model: its config, and the names of its weights.

Text-only prompts do not use the vision tower, so the language model is loaded, trained and saved as a plain causal LM.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, conversion_mapping

IMAGE_MODELS = {
    "gemma3", "gemma4", "internvl", "lfm2_vl", "llama4", "llava", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl",
    "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe",
}  # fmt: skip
"""Supported vision-language models, as transformers' ``model_type``; tests compare each with the full model."""

_SAME_AS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Text configs for which transformers has no causal LM class, and the equivalent ``model_type`` that has one."""

KEY_MAPPING = {
    r"^(?:model\.)?language_model\.(?:model\.)?(?!lm_head|model\.)": "model.",
    r"^(?:model\.)?language_model\.lm_head": "lm_head",
}
"""Regexes from weight names in checkpoints of vision-language models, of any version of transformers, to the LM's."""

_ALWAYS: dict[str, dict[str, Any]] = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
"""Settings that are hard-coded in such a text model, and config fields in the equivalent architecture."""

_OF_IMAGES = ("mrope_section", "mrope_interleaved", "type")


def text_half(config: Any) -> Any:
    """The config of a vision-language model's language model; any other config is returned unchanged.

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
        # Qwen's M-RoPE has three position ids per token. They are equal for text, which makes it plain RoPE.
        rope = fields.get("rope_parameters") or {}
        fields["rope_parameters"] = {name: value for name, value in rope.items() if name not in _OF_IMAGES}
        fields |= _ALWAYS.get(text.model_type, {})
    return AutoConfig.for_model(kind, **fields)


@contextmanager
def conversions_of(image_model: Any, text: Any) -> Iterator[None]:
    """While active, transformers converts the language model's weights as those of the vision-language checkpoint.

    Args:
        image_model: config of the checkpoint.
        text: its ``text_half``.
    """
    # Needed because the layouts differ: a Qwen3-VL checkpoint stores its experts transposed, one of Qwen3 does not.
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
