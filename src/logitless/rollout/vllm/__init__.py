"""Sampling on vLLM servers over HTTP, with the ways that weights take to them."""
