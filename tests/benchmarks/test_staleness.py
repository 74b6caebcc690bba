"""The simulated clock: numbers by hand, and bounds that no schedule beats."""

from hypothesis import given, settings
from hypothesis import strategies as st

from staleness import simulate

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
