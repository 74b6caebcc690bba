import pytest

from logitless.errors import ConfigurationError
from logitless.rewards.text.length import Length


def test_the_reward_is_the_length_up_to_the_cap():
    ids = [[1] * length for length in (0, 1, 19, 20, 21, 500)]
    assert Length(cap=20)(["p"] * 6, ["text"] * 6, ids) == [0, 1, 19, 20, 20, 20]


def test_words_are_separated_by_white_space_and_characters_are_all_counted():
    assert Length(unit="words")(["p"], [" a  b\nc "]) == [3]
    assert Length(unit="characters")(["p"], [" a  b\nc "]) == [8]


def test_tokens_cannot_be_counted_without_them():
    with pytest.raises(ConfigurationError, match="completion_ids"):
        Length()(["p"], ["text"])
