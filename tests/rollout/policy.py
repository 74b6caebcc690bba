"""A policy that tests of engines in other processes share: a llama of one layer and a character a token."""

from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.loading import load_model

SHAPE = {
    "model_type": "llama", "vocab_size": 11, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.5,
}  # fmt: skip
TOKENIZER = character_tokenizer("abcdefgh")


def tiny_policy(seed=0, **options):
    """With random weights; options of ``load_model``."""
    return load_model(SHAPE, random_weights=True, seed=seed, **options).eval()
