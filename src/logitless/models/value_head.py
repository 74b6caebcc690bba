"""The value head of PPO: one linear layer on the hidden states that the LM head uses.

``V_t`` predicts the return from token t on, before t is sampled, from ``hidden[t]``: the row that also predicts
``target[t]``. The backbone is shared with the policy, so the value loss trains it too. The value head is saved in a
file of its own; the saved model stays a plain language model.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from logitless.errors import ConfigurationError
from logitless.models.lm_head import lm_head


class ValueHead(nn.Module):
    """A linear value of each hidden state; it starts at 0.

    ``V_t = hidden_t @ weight[0] + bias``

    There is no dropout and no autocast: rows are converted to the dtype of the weights first.

    Args:
        width: D.
        dtype: float32, or float64 for a backbone of float64.

    Source: value head from 0 as in OpenAI's RLHF code (arXiv:1909.08593).

    Example:
        >>> head = ValueHead(4)
        >>> head(torch.ones(3, 4, dtype=torch.bfloat16))
        tensor([0., 0., 0.], grad_fn=<SqueezeBackward1>)
    """

    def __init__(self, width: int, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        # From 0, the first advantages are returns without the noise of a random function, and the value loss reaches
        # the backbone only as the head learns (dV / dhidden = weight).
        self.weight = nn.Parameter(torch.zeros(1, width, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N"]:
        """[N] in the dtype of the weights; gradient to the weights and through ``hidden`` to the backbone."""
        return F.linear(hidden.to(self.weight.dtype), self.weight, self.bias).squeeze(1)


def value_head_for(model: nn.Module, source: Path | None = None) -> ValueHead:
    """A value head for a causal LM: zeros, or loaded from a file of ``save_value_head``.

    Args:
        model: on its device, PEFT-wrapped or not; for a meta model only the shapes of ``source`` are checked.
        source: a ``value_head.safetensors``, or None for zeros.

    Raises:
        ConfigurationError: the file cannot be read, or was made for another hidden size.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                      vocab_size=11)
        >>> value_head_for(LlamaForCausalLM(config)).weight.shape
        torch.Size([1, 8])
    """
    reads = lm_head(model).weight
    head = ValueHead(reads.shape[1], dtype=torch.promote_types(reads.dtype, torch.float32))
    if source is not None:
        try:
            head.load_state_dict(load_file(source))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise ConfigurationError(
                needed=f"a value head for hidden states of width {reads.shape[1]}",
                given=f"{str(source)!r}: {error}",
                remedy="Give the value_head.safetensors of a run of this model, or leave it out to start at 0.",
            ) from error
    return head.to(reads.device)


def save_value_head(head: ValueHead, path: Path) -> None:
    """Write ``weight`` [1, D] and ``bias`` [1] as safetensors, in the dtype they are trained in.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "value_head.safetensors"
        >>> save_value_head(ValueHead(4), path)
        >>> sorted(load_file(path))
        ['bias', 'weight']
    """
    save_file({name: tensor.detach().cpu() for name, tensor in head.state_dict().items()}, path)
