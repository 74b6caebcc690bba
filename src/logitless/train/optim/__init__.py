"""Optimizers and their memory: AdamW, master weights, 8-bit and host-resident state."""
