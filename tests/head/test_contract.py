"""Arguments that do not fit are errors that say what to do."""

import inspect
from typing import Any

import pytest
import torch

from logitless.errors import InputError
from logitless.head.api import token_scores
from logitless.head.contract import checked
from logitless.types import LMHead

HIDDEN, WEIGHT, TARGET = torch.zeros(3, 4), torch.zeros(11, 4), torch.tensor([0, 5, 10])


def head(**fields: Any) -> LMHead:
    """An ``LMHead`` past the shape checks that only tests switch on."""
    made = object.__new__(LMHead)
    defaults = {"bias": None, "scale": 1.0, "softcap": None, "lora_a": None, "lora_b": None, "lora_scale": 1.0}
    for name, value in ({"weight": WEIGHT} | defaults | fields).items():
        object.__setattr__(made, name, value)
    return made


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden": torch.zeros(1, 3, 4)}, "hidden states \\[N, D\\].*float32 \\[1, 3, 4\\]"),
        ({"hidden": torch.zeros(3, 4, dtype=torch.int64)}, "hidden states .*int64"),
        ({"hidden": torch.zeros(3, 5)}, "weight of shape \\[11, 5\\].*\\[11, 4\\]"),
        ({"head": head(weight=torch.zeros(11))}, "weight of shape"),
        ({"head": torch.zeros(0, 4)}, "at least one token"),
        ({"head": head(weight=torch.zeros(11, 4, dtype=torch.uint8))}, "weight in float16.*uint8.*Dequantise"),
        ({"head": torch.zeros(11, 4, device="meta")}, "weight on cpu.*meta"),
        ({"head": head(bias=torch.zeros(4))}, "bias of shape \\[11\\].*\\[4\\]"),
        ({"head": head(lora_a=torch.zeros(2, 3), lora_b=torch.zeros(11, 2))}, "lora_a of shape \\[2, 4\\]"),
        ({"head": head(lora_a=torch.zeros(2, 4), lora_b=torch.zeros(11, 3))}, "lora_b of shape \\[11, 2\\]"),
        ({"target": torch.zeros(2, dtype=torch.int64)}, "one integer target per row \\(3\\)"),
        ({"target": torch.zeros(3)}, "one integer target per row"),
        ({"target": torch.zeros(3, dtype=torch.int64, device="meta")}, "target on cpu"),
        ({"target": torch.tensor([0, 5, 11])}, "targets in range\\(11\\)"),
        ({"temperature": 0.0}, "positive, finite temperature"),
        ({"temperature": float("inf")}, "positive, finite temperature"),
        ({"temperature": float("nan")}, "positive, finite temperature"),
        ({"temperature": torch.ones(2)}, "one temperature per row"),
        ({"temperature": torch.tensor([1.0, 1.0, 0.0])}, "positive, finite temperatures"),
        ({"temperature": torch.ones(3, requires_grad=True)}, "temperature without gradient.*detach"),
        ({"memory_budget": -1}, "memory budget of 0 bytes or more"),
        ({"anchor": torch.zeros(4)}, "anchor \\[3\\] of floats"),
        ({"anchor": torch.zeros(3, dtype=torch.bool)}, "anchor \\[3\\] of floats"),
        ({"nonzero": torch.ones(3, dtype=torch.int64)}, "nonzero \\[3\\] of booleans"),
        ({"nonzero": torch.zeros(3)}, "nonzero \\[3\\] of booleans"),
        ({"nonzero": torch.zeros(4, dtype=torch.bool)}, "nonzero \\[3\\] of booleans"),
        ({"backend": "fast"}, "'auto', 'reference', 'chunked' or 'fused'.*'fast'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_an_error(arguments, message):
    call = {"hidden": HIDDEN, "head": WEIGHT, "target": TARGET} | arguments
    with pytest.raises(InputError, match=message):
        inspect.unwrap(token_scores)(**call)


def test_a_module_in_place_of_a_head_is_refused():
    with pytest.raises(InputError, match=r"LMHead; given a Linear\. Give logitless\.models\.lm_head\.lm_head\(model\)"):
        checked(torch.zeros(1, 3), torch.nn.Linear(3, 4), torch.tensor([0]))
