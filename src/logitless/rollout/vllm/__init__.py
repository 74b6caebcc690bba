"""Engines of vLLM: in this process and over HTTP, with the ways that weights take to them."""
