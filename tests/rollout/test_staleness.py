"""The clock: numbers by hand, bounds that no schedule beats, and the smallest staleness that is fast."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.errors import InputError
from logitless.rollout.staleness import block_seconds, chosen_staleness, simulate

TIMES = st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=12)


def test_without_staleness_everything_is_in_turn_and_on_policy():
    found = simulate([3.0, 1.0, 2.0], [2.0, 5.0, 1.0], 0)
    assert (found.seconds, found.speedup, found.lag_max) == (14.0, 1.0, 0)


def test_a_schedule_by_hand():
    # k = 1, rollouts of 2, training of 3. Block 0: 0-2, trained 5. Block 1 needs nothing trained: 2-4, trained 8.
    # Block 2 needs block 0 trained, at 5: 5-7, trained 11; its weights are one version behind (block 1 is trained at
    # 8). Block 3 needs block 1, at 8: 8-10, trained 14.
    found = simulate([2.0] * 4, [3.0] * 4, 1)
    assert found.seconds == 14.0
    assert (found.lag_mean, found.lag_max) == (3 / 4, 1)


@settings(max_examples=50, deadline=None)
@given(TIMES, st.integers(0, 6))
def test_no_block_is_older_than_allowed_and_no_more_is_won_than_can_be(times, staleness):
    rollout, training = [r for r, _ in times], [t for _, t in times]
    found = simulate(rollout, training, staleness)
    assert found.lag_max <= staleness
    least = max(sum(rollout) + training[-1], rollout[0] + sum(training))
    assert least - 1e-9 <= found.seconds <= found.seconds_in_turn + 1e-9
    assert found.seconds <= simulate(rollout, training, max(0, staleness - 1)).seconds + 1e-9


def test_the_smallest_staleness_that_is_fast_is_chosen():
    assert chosen_staleness([5.0] * 50, [5.0] * 50).staleness == 1
    assert chosen_staleness([5.0] * 50, [0.01] * 50).staleness == 0
    varied = block_seconds(5.0, 1.0, 200, seed=1), block_seconds(5.0, 0.3, 200, seed=2)
    assert chosen_staleness(*varied).staleness > 1


def test_times_have_their_mean_and_spread():
    drawn = block_seconds(4.0, 0.5, 20000, seed=3)
    mean = sum(drawn) / len(drawn)
    spread = (sum((each - mean) ** 2 for each in drawn) / len(drawn)) ** 0.5
    assert mean == pytest.approx(4.0, rel=0.05)
    assert spread == pytest.approx(2.0, rel=0.1)
    assert drawn == block_seconds(4.0, 0.5, 20000, seed=3)


@pytest.mark.parametrize("wrong", [([], [], 0), ([1.0], [1.0, 2.0], 0), ([1.0], [1.0], -1), ([-1.0], [1.0], 0)])
def test_times_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InputError, match="each block"):
        simulate(*wrong)
