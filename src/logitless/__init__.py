"""RL post-training of language models without the logits."""
