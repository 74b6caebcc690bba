"""A tiny model with a tokenizer that knows every byte and Qwen's special tokens."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from logitless.models.loading import load_model

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
SPECIAL += ("<tool_response>", "</tool_response>")

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 272,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def byte_tokenizer():
    """One token a byte, the special tokens behind them; ``<|im_end|>`` ends a completion."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def write_model(folder, **config):
    """A model of random weights with its tokenizer, in a new folder."""
    load_model({**CONFIG, **config}, random_weights=True, seed=1).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
