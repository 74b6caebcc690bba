"""While testing, what says shapes is checked, and nothing else is slowed down by it."""

import jaxtyping
import pytest
import torch

from logitless.data import packing
from logitless.head.reference import token_scores
from logitless.types import LMHead, TokenScores


def test_a_function_refuses_another_shape_than_it_says():
    with pytest.raises(jaxtyping.TypeCheckError, match="target"):
        token_scores(torch.zeros(3, 4), LMHead(torch.zeros(5, 4)), torch.zeros(2, dtype=torch.long))


def test_a_dataclass_refuses_fields_whose_lengths_differ():
    with pytest.raises(jaxtyping.TypeCheckError, match="entropy"):
        TokenScores(logp=torch.zeros(3), entropy=torch.zeros(2))


def test_a_function_without_shapes_is_as_it_was_written():
    assert not hasattr(packing.pack, "__wrapped__")
