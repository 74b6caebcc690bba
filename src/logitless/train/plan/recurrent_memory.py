"""Memory of gated delta nets, counted from shapes: their states while sampling, and what training keeps of a token."""

from typing import Any, NamedTuple

CHUNK, BLOCK = 64, 16
"""Positions of a chunk and of its blocks, as in ``models.row_invariant.delta_net``, which needs Triton."""


class DeltaNets(NamedTuple):
    """The gated delta nets of a model.

    Args:
        layers: that have one.
        key_heads, heads: H and HV.
        key_width, width: K and V.
        taps: of the convolution.
    """

    layers: int
    key_heads: int
    heads: int
    key_width: int
    width: int
    taps: int

    @classmethod
    def of(cls, config: Any) -> "DeltaNets":
        """Of a transformers text config."""
        layers = (getattr(config, "layer_types", None) or []).count("linear_attention")
        heads = getattr(config, "linear_num_value_heads", None)
        if not layers or not heads:
            return cls(0, 0, 0, 0, 0, 0)
        return cls(
            layers, config.linear_num_key_heads, heads, config.linear_key_head_dim, config.linear_value_head_dim,
            config.linear_conv_kernel_dim,
        )  # fmt: skip

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_width + self.heads * self.width

    def slot_bytes(self, number: int) -> int:
        """Bytes that continue a sequence in all layers: last inputs, the state, and rows of an unfinished chunk.

        Args:
            number: bytes of a number in activations.

        Example:
            >>> DeltaNets(1, 16, 32, 128, 128, 4).slot_bytes(2)
            3342336
        """
        state = 4 * self.heads * self.key_width * self.width
        rows = self.key_heads * self.key_width + self.heads * (CHUNK + self.width)
        of_chunk = number * CHUNK * rows + 4 * CHUNK * self.heads * (2 + BLOCK)
        return self.layers * (number * (self.taps - 1) * self.channels + state + of_chunk)

    def sampling_bytes(self, rows: int, number: int) -> int:
        """Bytes of the slots of so many completions at once: of each, of a quarter as many prompts, and an empty one.

        Example:
            >>> DeltaNets(1, 16, 32, 128, 128, 4).sampling_bytes(512, 2) // 3342336
            641
        """
        return (rows + 1 - (-rows // 4)) * self.slot_bytes(number)

    def kept(self, number: int) -> int:
        """Bytes that one layer keeps of a token for its backward pass, between the projections.

        Kept are inputs and outputs of the convolution, unit queries and keys, two rows [C] of each head's chunk
        matrices, decays and beta in float32 with the products that they come from, and the rule's output, its gate
        and their product.
        """
        values = self.heads * self.width
        rows = 2 * self.channels + 2 * self.key_heads * self.key_width + 2 * self.heads * (CHUNK + 1) + 3 * values
        return number * rows + 2 * 4 * self.heads

    def made(self, number: int) -> int:
        """Bytes that the backward pass of one layer makes of a token between the projections.

        Each chunk's state and its gradient; gradients of the convolution's inputs and outputs, and of unit queries and
        keys for each value head; R and its gradient.
        """
        values, keys = self.heads * self.width, self.heads * self.key_width
        return number * (2 * keys * self.width // CHUNK + 2 * self.channels + 2 * keys + 2 * values)
