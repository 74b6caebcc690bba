"""Row-invariant decoders: layers, decoding, and the check of kernels."""
