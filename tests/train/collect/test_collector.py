"""The collector alone: what it draws, refills and remembers."""

from logitless.rewards.combine import weighted
from logitless.rewards.text.length import Length
from logitless.rollout.environment import SingleTurn
from logitless.rollout.sampling import SamplingOptions
from logitless.train.collect.collector import Collector
from logitless.train.recipe.rollout import RolloutSection
from logitless.types import Prompt
from tests.train.engines import Scripted

PROMPTS = [Prompt(letter, letter, (3 + i,)) for i, letter in enumerate("abcdefgh")]


def collector(answers=lambda _text, i: "a" * (1 + i), **options) -> Collector:
    section = RolloutSection(
        sampling=SamplingOptions(max_new_tokens=6), prompts_per_block=4, completions_per_prompt=2, **options
    )
    rewards = weighted([Length(cap=9)])
    return Collector(PROMPTS, Scripted(answers), SingleTurn(), rewards, section, seed=1)


def drawn(block) -> list[str]:
    return [group.prompt.id for group in block.drawn]


def test_a_block_has_its_prompts_judged_in_the_order_of_the_seed():
    block = collector().next(0)
    assert drawn(block) == drawn(collector().next(0))
    assert len({*drawn(block)}) == 4
    assert all(group.rewards == (1.0, 2.0) for group in block.drawn)
    assert (block.kept, block.rounds) == ((True,) * 4, 1)


def test_each_block_and_each_refill_samples_with_a_seed_of_its_own():
    made = collector(lambda _text, _i: "a", zero_signal="refill", max_refills=1)
    made.next(0)
    made.next(1)
    again = collector()
    again.next(1)
    seeds = [seed for *_, seed in made.engine.asked]
    assert len({*seeds}) == 4
    assert again.engine.asked[0][3] == seeds[2]


def test_a_refill_asks_for_as_many_prompts_as_lack_a_signal_and_stops_at_its_limit():
    made = collector(lambda text, i: "a" * (1 + i * (text in "abcd")), zero_signal="refill", max_refills=3)
    block = made.next(0)
    missing = 4
    for texts, *_ in made.engine.asked:
        assert len(texts) == missing
        missing -= sum(text in "abcd" for text in texts)
    assert [text in "abcd" for text in drawn(block)] == list(block.kept)
    assert sum(block.kept) == 4 - missing
    never = collector(lambda _text, _i: "a", zero_signal="refill", max_refills=3).next(0)
    assert (never.rounds, sum(never.kept), never.trained) == (4, 0, [])


def test_it_goes_on_where_its_state_says():
    whole, first, second = collector(), collector(), collector()
    blocks = [drawn(whole.next(number)) for number in range(3)]
    assert drawn(first.next(0)) == blocks[0]
    second.load_state_dict(first.state_dict())
    assert [drawn(second.next(number)) for number in (1, 2)] == blocks[1:]


def test_the_guardrail_shortens_completions_but_leaves_one_token():
    made = collector()
    for factor in (1.0, 0.5, 0.01):
        made.next(0, length_factor=factor)
    assert [options.max_new_tokens for *_, options, _ in made.engine.asked] == [6, 3, 1]
