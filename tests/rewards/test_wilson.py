"""Wilson's interval, against published numbers."""

import pytest

from logitless.rewards.wilson import wilson_interval


@pytest.mark.parametrize(
    ("passed", "count", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962)],
)
def test_it_has_the_published_numbers(passed, count, low, high):
    expected = (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))
    assert wilson_interval(passed / count, count) == expected


def test_of_nothing_it_is_everything():
    assert wilson_interval(float("nan"), 0) == (0.0, 1.0)
