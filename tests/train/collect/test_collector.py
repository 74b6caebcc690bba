"""The collector: what it draws, refills and remembers, alone and with several ranks."""

import json

import torch.distributed as dist

from logitless.distributed import Ranks
from logitless.rewards.reward import weighted
from logitless.rewards.text.length import Length
from logitless.rollout.environment import SingleTurn
from logitless.rollout.sampling import SamplingOptions
from logitless.train.collect.collector import Collector, GroupSampler
from logitless.train.collect.group_json import decode_groups, encode_groups
from logitless.train.recipe.rollout import RolloutSection
from logitless.types import Completion, Prompt
from tests.ranks import run_on_ranks
from tests.train.engines import FakeEngine, Scripted

PROMPTS = [Prompt(letter, letter, (3 + i,)) for i, letter in enumerate("abcdefgh")]


def collector(answers=lambda _text, i: "a" * (1 + i), **options) -> Collector:
    section = RolloutSection(
        sampling=SamplingOptions(max_new_tokens=6), prompts_per_block=4, completions_per_prompt=2, **options
    )
    rewards = weighted([Length(cap=9)])
    return Collector(PROMPTS, Scripted(answers), SingleTurn(), rewards, section, seed=1)


def drawn(block) -> list[str]:
    return [group.prompt.id for group in block.sampled]


def test_a_block_has_its_prompts_judged_in_the_order_of_the_seed():
    block = collector().next(0)
    assert drawn(block) == drawn(collector().next(0))
    assert len({*drawn(block)}) == 4
    assert all(group.rewards == (1.0, 2.0) for group in block.sampled)
    assert (block.kept, block.rounds) == ((True,) * 4, 1)


def test_under_remax_each_group_has_the_reward_of_a_greedy_completion_of_its_prompt():
    made = collector(lambda text, i: "a" * (1 + i) + "b" * (text == "c"))
    made.greedy_baseline = True
    groups = made.next(0).sampled
    assert [group.baseline for group in groups] == [1.0 + (group.prompt.text == "c") for group in groups]
    (_, num_samples, sampled, _), (texts, one, greedy, _) = made.engine.asked
    assert (texts, num_samples, one, sampled.temperature, greedy.temperature) == (
        [g.prompt.text for g in groups],
        2,
        1,
        1.0,
        0.0,
    )
    rest, numbers = encode_groups(groups)
    assert decode_groups([group.prompt for group in groups], json.loads(json.dumps(rest)), numbers) == list(groups)


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


# --- with several ranks


class Counting(FakeEngine):
    """An engine whose completions say what they were asked for."""

    def __init__(self):
        self.asked = []

    def sample(self, prompts, num_samples, options, *, seed):
        self.asked.append([prompt.id for prompt in prompts])
        return [
            [
                Completion(p.id, (seed % 7, *range(g)), f"{p.id}/{g}", "stop", weights_version=2)
                for g in range(num_samples)
            ]
            for p in prompts
        ]


def sampled_by(engine, prompts, num_samples, seed):
    """Groups of one or all ranks."""
    ranks = Ranks(data=dist.group.WORLD) if dist.is_initialized() else Ranks.alone()
    rewards, options = weighted([Length()]), SamplingOptions(max_new_tokens=4)
    sampler = GroupSampler(engine, SingleTurn(), rewards, "leave_out", ranks=ranks)
    return sampler(prompts, num_samples, options, seed=seed)


def _groups(rank, num_prompts):
    engine = Counting()
    prompts = [Prompt(str(i), f"prompt {i}", (i + 1,)) for i in range(num_prompts)]
    return sampled_by(engine, prompts, num_samples=2, seed=11), engine.asked


def test_each_rank_samples_its_share_and_all_get_all_groups():
    alone, asked = _groups(0, 5)
    assert asked == [["0", "1", "2", "3", "4"]]
    (first, asked_first), (second, asked_second) = run_on_ranks(2, _groups, 5)
    assert first == second == alone
    assert (asked_first, asked_second) == ([["0", "2", "4"]], [["1", "3"]])


def test_a_rank_without_a_prompt_asks_for_nothing():
    alone, _ = _groups(0, 1)
    (first, _), (second, asked) = run_on_ranks(2, _groups, 1)
    assert first == second == alone
    assert asked == []
