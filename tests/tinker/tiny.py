"""A tiny model with a tokenizer that knows every byte and Qwen's special tokens."""

from logitless.models.loading import load_model
from tinker_recipes import byte_tokenizer

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


def write_model(folder, **config):
    """A model of random weights with its tokenizer, in a new folder."""
    load_model({**CONFIG, **config}, random_weights=True, seed=1).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
