"""Episodes: a single turn is the plain sample; in several turns every token has its author and its turn's reward."""

import math
import re
from dataclasses import replace

import pytest

from logitless.data.packing import pack
from logitless.errors import ConfigurationError, EngineError, InputError
from logitless.rewards.reward import judge, weighted
from logitless.rewards.text.exact import Exact
from logitless.rollout.environment import Limits, Reply, SingleTurn, play
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.transformers import TransformersEngine
from logitless.train.collect.refill import OneAtATime
from logitless.types import Completion, Prompt
from tests.models.tiny import tiny
from tests.rollout.engines import StandIn, episode_of
from tests.rollout.test_transformers import prompts, tokenizer

OPTIONS = SamplingOptions(max_new_tokens=4)
PROMPT = Prompt("7", "", (4,))


class AskAgain:
    """Replies "again" once, and rewards each turn by its length."""

    def start(self, prompt, *, seed):
        return {"turns": 0, "seed": seed}

    def reply(self, state, turn):
        state["turns"] += 1
        paid = turn.length / 10
        if state["turns"] == 2 or turn.text == "enough":
            return Reply(paid)
        return Reply(paid, ({"role": "user", "content": "again"},), (8, 9))


class Echo(StandIn):
    """Samples the number of prompt tokens; records its calls."""

    def __init__(self, text="go on", finish_reason="stop"):
        self.asked, self.text, self.finish_reason = [], text, finish_reason

    def sample(self, prompts, num_samples, options, *, seed):
        self.asked.append(([(p.id, p.token_ids.tolist()) for p in prompts], num_samples, seed))
        logp, version = (-0.5, -1.0), len(self.asked)
        return [
            [Completion(p.id, (len(p.token_ids), 1), self.text, self.finish_reason, logp, None, None, version)]
            * num_samples
            for p in prompts
        ]


def test_a_single_turn_is_what_the_engine_samples():
    engine, asked = TransformersEngine(tiny("llama"), tokenizer()), prompts(3, 5)
    episodes = play(engine, asked, SingleTurn(), num_samples=3, options=OPTIONS, seed=4)
    assert [[e.completion for e in group] for group in episodes] == engine.sample(asked, 3, OPTIONS, seed=4)
    assert all(e.turn_rewards == () and e.num_turns == 1 for group in episodes for e in group)


def test_a_second_turn_reads_everything_before_it_and_every_token_knows_who_wrote_it():
    engine, prompt = Echo(), Prompt("7", "2+2=", (4, 5, 6))
    episode = episode_of(engine, AskAgain(), prompt)
    assert [ids for asked, *_ in engine.asked for _, ids in asked] == [[4, 5, 6], [4, 5, 6, 3, 1, 8, 9]]
    completion = episode.completion
    assert completion == Completion(
        "7",
        (3, 1, 8, 9, 7, 1),
        "go on",
        "stop",
        logp_sampler=(-0.5, -1.0, 0.0, 0.0, -0.5, -1.0),
        trained=(True, True, False, False, True, True),
        turn=(0, 0, 0, 0, 1, 1),
        weights_version=1,  # the oldest of its turns
        token_versions=(1, 1, 1, 1, 2, 2),
    )
    assert episode.turn_rewards == (0.2, 0.2)
    assert [m["role"] for m in episode.messages] == ["user", "assistant", "user", "assistant"]
    packed = pack([(prompt, completion)])
    assert packed.target.tolist() == [3, 1, 7, 1]
    assert packed.turn.tolist() == [0, 0, 1, 1]


def test_episodes_of_one_prompt_go_on_side_by_side_under_ids_of_their_own():
    engine = Echo()
    play(engine, [Prompt("7", "", (4,)), Prompt("8", "", (5,))], AskAgain(), num_samples=2, options=OPTIONS, seed=0)
    (_, first_samples, first), (asked, num_samples, second) = engine.asked
    assert (first_samples, num_samples) == (2, 1)
    assert first != second
    assert len({prompt_id for prompt_id, _ in asked}) == len(asked) == 4


@pytest.mark.parametrize("engine", [Echo(text="enough"), Echo(finish_reason="length")])
def test_an_episode_ends_where_the_environment_is_done_or_a_turn_is_cut(engine):
    episode = episode_of(engine, AskAgain(), PROMPT)
    assert len(engine.asked) == episode.num_turns == 1
    assert episode.completion.finish_reason == engine.finish_reason
    assert episode.completion.trained is None  # the engine's own completion, as it is


class Always(AskAgain):
    """Gives the same reply to every turn."""

    def __init__(self, *messages, token_ids=()):
        self.answer = {"messages": messages, "token_ids": token_ids}

    def reply(self, state, turn):
        return Reply(**self.answer)


def test_an_answer_without_tokens_is_refused():
    said = {"role": "tool", "content": "4"}
    with pytest.raises(InputError, match="ChatEnvironment"):
        played(Always(said))
    with pytest.raises(InputError, match="1 messages"):
        Reply(messages=(said,), failure="broken")


def played(environment, **limits):
    return episode_of(Echo(), environment, PROMPT, limits=Limits(**limits))


def test_an_episode_that_a_limit_ends_is_cut_and_one_that_the_environment_ends_is_not():
    assert played(AskAgain(), max_turns=2).completion.finish_reason == "stop"
    cut = played(AskAgain(), max_turns=1).completion
    assert cut.finish_reason == "length"
    assert cut.token_ids.tolist() == [1, 1]  # what would have been answered is not there


@pytest.mark.parametrize(("max_tokens", "turns"), [(8, 2), (7, 1)])
def test_a_turn_begins_only_where_it_fits_into_the_tokens_of_the_episode(max_tokens, turns):
    # A turn of 2 tokens and an answer of 2; the next may have 4.
    episode = played(AskAgain(), max_tokens=max_tokens)
    assert episode.num_turns == turns
    assert episode.completion.finish_reason == ("stop" if turns == 2 else "length")


def test_no_turn_begins_after_the_seconds_of_an_episode():
    times, forever = iter([0.0, 1.0, 3.0, 6.0]), Always({"role": "user", "content": "again"}, token_ids=(8,))
    episode = episode_of(Echo(), forever, PROMPT, limits=Limits(max_seconds=5.0), clock=lambda: next(times))
    assert episode.num_turns == 3
    assert episode.completion.finish_reason == "length"


@pytest.mark.parametrize("limits", [{"max_turns": 0}, {"max_tokens": -1}, {"max_seconds": float("nan")}])
def test_limits_are_positive(limits):
    with pytest.raises(ConfigurationError, match="positive"):
        Limits(**limits)


def test_an_environment_that_raises_ends_its_episodes_without_a_reward():
    class Broken(AskAgain):
        def reply(self, state, turn):
            raise RuntimeError("no more")

    episode = played(Broken())
    assert "RuntimeError: no more" in episode.failure
    prompt = replace(PROMPT, columns={"answer": "go on"})
    [group] = judge([prompt], [[episode]], weighted([Exact()]), unscored="leave_out")
    assert group.rewards == (None,)
    verdict = group.verdicts[0]["exact"]
    assert (verdict.score, verdict.status) == (None, "error")
    assert "no more" in verdict.message
    assert "Traceback" in verdict.traceback


def test_an_environment_that_cannot_start_an_episode_fails_that_one_alone():
    class Picky(AskAgain):
        def start(self, prompt, *, seed):
            if prompt.id == "a":
                raise KeyError("secret")
            return super().start(prompt, seed=seed)

    prompts = [replace(PROMPT, id="a"), replace(PROMPT, id="b")]
    [[failed], [played_on]] = play(
        Echo(), prompts, Picky(), num_samples=1, options=SamplingOptions(9), seed=0, limits=Limits(max_turns=2)
    )
    assert failed.failure.startswith("KeyError: 'secret'\nTraceback")
    assert not played_on.failure


def raise_an_error():
    return {}["secret"]


@pytest.mark.parametrize(
    ("replies", "failure"),
    [
        (raise_an_error, "KeyError: 'secret'"),
        (lambda: "no", "TypeError: Picky has to return a Reply for each turn, not a str"),
        (lambda: Reply(math.inf), "a finite number expected as reward, inf given"),
        (lambda: Reply(math.nan), "a finite number expected as reward, nan given"),
        (lambda: Reply("1"), "a finite number expected as reward, '1' given"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_an_environment_that_fails_in_one_episode_fails_no_other(replies, failure, wrapped):
    class Picky(AskAgain):
        def start(self, prompt, *, seed):
            return {**super().start(prompt, seed=seed), "picky": prompt.id == "a"}

        def reply(self, state, turn):
            return replies() if state["picky"] else super().reply(state, turn)

    asked = [replace(PROMPT, id="a"), replace(PROMPT, id="b")]
    environment = OneAtATime(Picky()) if wrapped else Picky()
    groups = play(Echo(), asked, environment, num_samples=2, options=SamplingOptions(9), seed=0)
    assert [[e.failure.partition("\n")[0] for e in group] for group in groups] == [[failure] * 2, [""] * 2]
    assert [e.turn_rewards for e in groups[1]] == [(0.2, 0.2)] * 2
    rewards = [group.rewards for group in judge(asked, groups, [], unscored="leave_out")]
    assert rewards == [(None, None), pytest.approx((0.4, 0.4))]


def test_the_traceback_of_a_failed_episode_begins_in_the_code_of_the_user():
    class Broken(AskAgain):
        def reply(self, state, turn):
            return raise_an_error()

    files = re.findall(r'File "(.*?)", line \d+, in (\w+)', played(Broken()).failure)
    assert files == [(__file__, "reply"), (__file__, "raise_an_error")]


@pytest.mark.parametrize(("said", "given"), [("no", "str"), (None, "NoneType")])
def test_what_is_no_reply_fails_the_episode_and_says_what_is_needed(said, given):
    class Talks(AskAgain):
        def reply(self, state, turn):
            return said

    assert f"Talks has to return a Reply for each turn, not a {given}" in played(Talks()).failure


@pytest.mark.parametrize(
    "messages",
    [
        {"role": "user", "content": "no"},
        "no",
        ["no"],
        [{"content": "no"}],
        [{"role": "user"}],
        [{"role": "user", "content": 4}],
        [{"role": "user", "content": [{"type": "text", "text": "no"}]}],
        None,
    ],
    ids=str,
)
@pytest.mark.parametrize("batched", [False, True])
def test_messages_of_another_form_fail_the_episode_where_the_reply_is_made(messages, batched):
    class Talks(AskAgain):
        def reply(self, state, turn):
            return Reply(messages=messages)

    class TalksToMany(Talks):
        def replies(self, states, turns):
            return [self.reply(state, turn) for state, turn in zip(states, turns, strict=True)]

    failure = played((TalksToMany if batched else Talks)()).failure
    said, *_ = failure.splitlines()
    assert said.startswith(
        "InputError: needed messages as a list of mappings with a text as role and a text as content"
    )
    assert said.endswith('Give messages=[{"role": "user", "content": "..."}].')
    assert re.findall(r'File "(.*?)", line \d+, in', failure)[0] == __file__


# --- an engine of somebody else's that does not answer what it was asked is named at its first call -------------------


ASKED = [Prompt("a", "2+2=", (4,)), Prompt("b", "3+3=", (5,))]


def said(name: str, finish_reason: str = "stop") -> Completion:
    made = Completion(name, (6,), "6", "stop")
    object.__setattr__(made, "finish_reason", finish_reason)  # as where types are not checked
    return made


@pytest.mark.parametrize(
    ("answer", "needed"),
    [
        ([[said("a")] * 2, [said("b")]], "2 completions of prompt 'b'.*; given 1"),
        ([[said("a")] * 2], "each of 2 prompts.*; given 1 lists"),
        ([[said("b")] * 2, [said("a")] * 2], "of prompt 'a', in the prompts' order.*; given one of 'b'"),
        ([[said("a")] * 2, [said("b"), said("a")]], "of prompt 'b'.*; given one of 'a'"),
        ([["6"] * 2, ["6"] * 2], "Completion for prompt 'a'.*; given a str"),
        ([said("a"), said("b")], "2 completions of prompt 'a'.*; given 1"),
        ([[said("a", "eos")] * 2, [said("b")] * 2], "finish_reason stop or length.*; given 'eos'"),
        (None, "a list of completions.*; given a NoneType"),
    ],
)
def test_an_answer_that_was_not_asked_for_is_refused(answer: object, needed: str) -> None:
    class Engine(StandIn):
        def sample(self, *arguments: object, **options: object) -> object:
            return answer

    with pytest.raises(EngineError, match=needed):
        play(Engine(), ASKED, SingleTurn(), num_samples=2, options=SamplingOptions(3), seed=0)
