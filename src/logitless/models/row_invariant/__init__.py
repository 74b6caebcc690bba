"""A decoder whose rows depend on nothing else: layers, decoding, and the check of kernels."""
