"""The guessing game replies to every guess, rewards the right one, and is played through a recipe's data."""

import re

import pytest

from logitless.data.sources import GuessingData, read_rows
from logitless.errors import ConfigurationError, DataError
from logitless.rollout.chat import ChatEnvironment, ChatTurns
from logitless.rollout.environment import Limits
from logitless.rollout.environments.text_game import GuessingGame
from logitless.types import Completion, Prompt
from tests.rollout.engines import StandIn, episode_of
from tests.rollout.templates import chat_tokenizer


class Halving(StandIn):
    """An engine that halves the range by the replies, which it reads from the tokens of the whole episode."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def sample(self, prompts, num_samples, options, *, seed):
        return [[self.guess(prompt) for _ in range(num_samples)] for prompt in prompts]

    def guess(self, prompt):
        low, high = 1, 100
        guess = (low + high) // 2
        text = self.tokenizer.decode(prompt.token_ids).replace(" ", "")
        for said in re.findall("higher|lower", text):
            low, high = (guess + 1, high) if said == "higher" else (low, guess - 1)
            guess = (low + high) // 2
        ids = self.tokenizer(f"{guess}<|im_end|>", add_special_tokens=False)["input_ids"]
        return Completion(prompt.id, tuple(ids), str(guess), "stop")


def test_who_halves_the_range_finds_the_number_in_seven_turns():
    tokenizer = chat_tokenizer("qwen")
    environment = ChatEnvironment(GuessingGame(per_guess=0.1), ChatTurns(tokenizer))
    prompts = [Prompt(str(n), "", (5,), columns={"secret": n}) for n in (50, 25, 1, 100)]
    limits = Limits(max_turns=7)
    episodes = [episode_of(Halving(tokenizer), environment, prompt, limits=limits) for prompt in prompts]
    turns = [episode.num_turns for episode in episodes]
    assert turns == [1, 2, 6, 7]
    assert [sum(e.turn_rewards) for e in episodes] == pytest.approx([1 - 0.1 * (n - 1) for n in turns])


def test_what_is_no_number_is_answered_and_counts():
    game = GuessingGame(per_guess=0.5)
    state = game.start(Prompt("7", "", (4,), columns={"secret": 5}), seed=0)
    assert game.reply(state, Completion("7", (4,), "who knows", "stop")).messages[0]["content"] == "no"
    assert game.reply(state, Completion("7", (4,), "5", "stop")).reward == 0.5


def test_rows_are_made_from_the_seed_with_a_number_in_their_range():
    rows = read_rows(GuessingData(size=50, seed=3, low=10, high=20))
    assert rows == read_rows(GuessingData(size=50, seed=3, low=10, high=20))
    assert rows != read_rows(GuessingData(size=50, seed=4, low=10, high=20))
    for row in rows:
        words = row.values["prompt"].removesuffix(".").split()
        assert 10 <= int(words[4]) <= row.values["secret"] <= int(words[6]) <= 20


def test_a_row_without_a_number_and_senseless_settings_are_refused():
    with pytest.raises(DataError, match="'secret'"):
        GuessingGame().start(Prompt("7", "", (4,)), seed=0)
    with pytest.raises(ConfigurationError, match="per_guess"):
        GuessingGame(per_guess=2.0)
    with pytest.raises(ConfigurationError, match="low below high"):
        GuessingData(size=1, seed=0, low=5, high=5)
