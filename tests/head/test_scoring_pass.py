"""The product of the scoring pass with Hopper's tiles, alone: its exponentials and their sums at every edge."""

import pytest

pytest.importorskip("triton")

from logitless.head.kernels import variants
from tests.head import scoring_pass
from tests.head.interpreter import interpreted
from tests.head.scoring_pass import EDGES

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")

HOPPER = variants.hopper(896, 2)
"""With two multiprocessors, so that a program has several tiles."""


@pytest.mark.parametrize("shape", EDGES, ids=str)
def test_exponentials_and_their_sums_are_right_at_every_edge(shape):
    given = scoring_pass.drawn(shape, HOPPER)
    found = scoring_pass.scored(given, shape.num_kept)
    assert scoring_pass.wrong(found, given, shape.num_kept) == []
