"""A block from what was drawn to what is trained on."""

from logitless.train.block import have_signal
from tests.train.groups import group_of


def test_a_group_has_a_signal_where_its_known_rewards_differ():
    groups = [
        group_of("1", [1.0, 1.0]),
        group_of("2", [1.0, 0.0]),
        group_of("3", [1.0, None]),
        group_of("4", [None, None]),
    ]
    assert have_signal(groups) == [False, True, False, False]
