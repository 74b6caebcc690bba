"""Engines that sample completions: transformers, recorded files."""
