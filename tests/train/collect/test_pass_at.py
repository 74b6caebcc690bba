"""pass@k is the mean over all choices of k of n samples; intervals hold."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitless.train.collect.pass_at import pass_at_k, success_metrics


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("correct", range(6))
def test_pass_at_k_is_the_share_of_choices_with_a_correct_one(correct: int, k: int) -> None:
    samples = [True] * correct + [False] * (5 - correct)
    chosen = list(combinations(samples, k))
    assert pass_at_k(5, correct, k) == pytest.approx(sum(map(any, chosen)) / len(chosen), abs=1e-12)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=9))
def test_success_rises_with_k_and_lies_in_its_interval(correct: list[int]) -> None:
    found = success_metrics(correct, 6)
    names = ["accuracy", *(f"pass_at/{k}" for k in (2, 4, 6))]
    assert sorted(found) == sorted(f"{name}{end}" for name in names for end in ("", "/low", "/high"))
    values = [found[name] for name in names]
    assert all(one <= other + 1e-12 for one, other in pairwise(values))
    assert all(found[f"{name}/low"] <= found[name] + 1e-12 for name in names)
    assert all(found[name] <= found[f"{name}/high"] + 1e-12 for name in names)


def test_one_sample_a_prompt_has_accuracy_alone() -> None:
    assert sorted(success_metrics([1, 0, 1], 1)) == [f"accuracy{end}" for end in ("", "/high", "/low")]
