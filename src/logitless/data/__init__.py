"""Prompts, filtering that counts what it drops, and packing (the one shift)."""
