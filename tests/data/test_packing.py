"""The one shift, and the cut of a block into steps and micro-batches."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.data import packing
from logitless.data.packing import Packing, pack, plan_epoch, share_prompts
from logitless.errors import InputError
from logitless.types import Completion, PackedInputs, Prompt, PromptGroup, SharedInputs


def _prompt(*ids: int) -> Prompt:
    return Prompt(id=str(ids), text="", token_ids=ids)


def _completion(prompt: Prompt, *ids: int, **fields) -> Completion:
    return Completion(prompt.id, token_ids=ids, text="", finish_reason="stop", **fields)


def test_a_target_is_predicted_from_the_token_before_it():
    first, second = _prompt(1, 2), _prompt(3)
    batch = pack([(first, _completion(first, 4, 5)), (second, _completion(second, 6, 7, 8))])
    # read: 1 2 4 | 3 6 7; the rows that predict 4 5 6 7 8 stand at 2 4 3 6 7
    assert batch.inputs.input_ids.tolist() == [1, 2, 4, 3, 6, 7]
    assert batch.inputs.position_ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.inputs.input_ids[batch.inputs.source].tolist() == [2, 4, 3, 6, 7]
    assert batch.target.tolist() == [4, 5, 6, 7, 8]
    assert batch.sequence.tolist() == [0, 0, 1, 1, 1]


def test_a_token_that_a_tool_wrote_is_read_but_has_no_row():
    prompt = _prompt(1)
    batch = pack([(prompt, _completion(prompt, 4, 5, 6, trained=(True, False, True), turn=(0, 0, 1)))])
    assert batch.inputs.input_ids.tolist() == [1, 4, 5]
    assert batch.target.tolist() == [4, 6]
    assert batch.inputs.input_ids[batch.inputs.source].tolist() == [1, 5]
    assert batch.turn.tolist() == [0, 1]


def test_a_token_that_a_tool_wrote_is_a_target_of_its_own_where_it_is_asked_for():
    prompt = Prompt("a", "", (1, 2))
    pairs = [
        (prompt, Completion("a", (3, 4, 5, 6), "", "stop", trained=(True, False, False, True))),
        (prompt, Completion("a", (7, 8), "", "stop", trained=(False, False))),  # nothing is scored, so nothing is read
        (prompt, Completion("a", (9,), "", "stop")),
    ]
    batch = pack(pairs, observed=True)
    observed = batch.observed
    assert observed.target.tolist() == [4, 5]
    assert observed.inputs.source_counts == (2, 0, 0)
    assert batch.inputs.input_ids[observed.inputs.source].tolist() == [3, 4]  # each is predicted from the one before
    swapped = batch.take([2, 0])
    assert swapped.inputs.input_ids[swapped.observed.inputs.source].tolist() == [3, 4]
    plain = pack(pairs)
    assert plain.observed is None
    for name in ("target", "turn"):
        assert torch.equal(getattr(plain, name), getattr(batch, name))


def test_an_empty_completion_counts_as_a_sequence_and_is_not_read():
    prompt = _prompt(1, 2)
    batch = pack([(prompt, _completion(prompt)), (prompt, _completion(prompt, 3))])
    assert batch.num_sequences == 2
    assert batch.inputs.lengths == (0, 2)
    assert batch.sequence.tolist() == [1]


def test_sampler_log_probabilities_stay_with_their_tokens_and_missing_ones_are_nan():
    prompt = _prompt(1)
    given_ones = _completion(prompt, 4, 5, logp_sampler=(-0.5, -1.5))
    batch = pack([(prompt, given_ones), (prompt, _completion(prompt, 6))])
    assert batch.logp_sampler[:2].tolist() == [-0.5, -1.5]
    assert batch.logp_sampler[2].isnan()


def test_each_token_has_the_lag_of_the_weights_that_sampled_it():
    prompt = _prompt(1)
    changed = _completion(prompt, 4, 5, 6, trained=(True, False, True), weights_version=3, token_versions=(3, 3, 5))
    whole, unknown = _completion(prompt, 7, weights_version=6), _completion(prompt, 8)
    assert pack([(prompt, each) for each in (changed, whole, unknown)], version=7).lag.tolist() == [4, 2, 1, 0]
    assert pack([(prompt, whole)]).lag is None


def test_a_prompt_without_tokens_is_refused():
    prompt = _prompt()
    with pytest.raises(InputError, match="at least one token"):
        pack([(prompt, _completion(prompt, 1))])


def _inputs(lengths: list[int]) -> PackedInputs:
    """Sequences whose every token but the first two is scored; length 0 stands for an empty completion."""
    counts = [max(0, n - 1) for n in lengths]
    zeros = torch.zeros(sum(lengths), dtype=torch.long)
    return PackedInputs(zeros, zeros, tuple(lengths), torch.zeros(sum(counts), dtype=torch.long), tuple(counts))


@settings(max_examples=50, deadline=None)
@given(
    groups=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=8),
    tokens_per_step=st.integers(1, 60),
    tokens_per_row=st.integers(9, 40),
    seed=st.integers(0, 3),
)
def test_every_sequence_is_in_one_step_and_groups_stay_whole(groups, tokens_per_step, tokens_per_row, seed):
    inputs = _inputs([n for group in groups for n in group])
    first = sum(map(len, groups))
    left = iter(range(first))
    members = [[next(left) for _ in group] for group in groups]
    packing = Packing(tokens_per_row, share_prompts=False)
    steps = plan_epoch(members, inputs, tokens_per_step=tokens_per_step, packing=packing, seed=seed)
    assert sorted(s for step in steps for s in step.sequences) == list(range(first))
    for group in members:
        assert sum(set(group) <= set(step.sequences) for step in steps) == 1
    for step in steps:
        rows = [s for row in step.micro_batches for s in row]
        assert rows == [s for s in step.sequences if inputs.source_counts[s]]
        assert all(sum(inputs.lengths[s] for s in row) <= tokens_per_row for row in step.micro_batches)
        assert step.micro_batches or not sum(inputs.source_counts)


def test_steps_have_about_the_tokens_that_were_asked_for():
    inputs = _inputs([11] * 32)  # 320 scored tokens in 16 groups of 20
    members = [[2 * i, 2 * i + 1] for i in range(16)]
    steps = plan_epoch(members, inputs, tokens_per_step=80, packing=Packing(64), seed=0)
    assert [sum(inputs.source_counts[s] for s in step.sequences) for step in steps] == [80, 80, 80, 80]


def test_a_group_of_empty_completions_joins_a_step_with_tokens():
    inputs = _inputs([1, 1, 11, 11])  # 0, 0, 10 and 10 scored tokens: the empty group would fill a step of two alone
    for seed in range(4):
        steps = plan_epoch([[0, 1], [2, 3]], inputs, tokens_per_step=10, packing=Packing(32), seed=seed)
        assert all(step.micro_batches for step in steps)
        assert sorted(s for step in steps for s in step.sequences) == [0, 1, 2, 3]


def test_the_order_follows_the_seed():
    inputs, members = _inputs([3] * 16), [[i] for i in range(16)]

    def order(seed: int) -> list[int]:
        steps = plan_epoch(members, inputs, tokens_per_step=1000, packing=Packing(1000), seed=seed)
        return list(steps[0].sequences)

    assert order(1) == order(1) != order(2)


def test_a_sequence_over_the_micro_batch_limit_is_refused_with_a_remedy():
    with pytest.raises(InputError, match=r"tokens_per_micro_batch = 8 .*given one of 9.*Raise"):
        plan_epoch([[0]], _inputs([9]), tokens_per_step=8, packing=Packing(8), seed=0)


# --- prompts that stand once


def _sequences(groups: tuple[PromptGroup, ...], ids: list[int], positions: list[int]) -> list[tuple[int, ...]]:
    """Every sequence of a row in full, read off its tree; each token stands where its sequence has it."""
    found: list[tuple[int, ...]] = []
    at = 0

    def read(group: PromptGroup, before: tuple[int, ...]) -> None:
        nonlocal at
        assert positions[at : at + group.prompt] == list(range(len(before), len(before) + group.prompt))
        whole = before + tuple(ids[at : at + group.prompt])
        at += group.prompt
        for each in group.branches:
            read(each, whole)
        if not group.branches:
            found.append(whole)

    for group in groups:
        read(group, ())
    assert at == len(ids)
    return found


TEXTS = st.lists(st.integers(0, 2), max_size=7)
"""Of so few different tokens that many begin alike."""


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.tuples(TEXTS.filter(len), st.lists(TEXTS, min_size=1, max_size=5)), min_size=1, max_size=5),
    least=st.integers(1, 3),
    data=st.data(),
)
def test_share_prompts_keeps_every_sequence_and_stores_shared_prefixes_once(groups, least, data):
    pairs = []
    for ids, completions in groups:
        prompt = _prompt(*ids)
        pairs += [(prompt, _completion(prompt, *each)) for each in completions]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "LEAST_SHARED", least)
        batch = pack(pairs)
    batch = batch.take(data.draw(st.permutations(range(len(pairs)))))
    shared = share_prompts(batch.inputs)
    assert torch.equal(shared.input_ids[shared.source], batch.inputs.input_ids[batch.inputs.source])
    assert torch.equal(shared.position_ids[shared.source], batch.inputs.position_ids[batch.inputs.source])
    if not isinstance(shared, SharedInputs):
        return
    found = _sequences(shared.groups, shared.input_ids.tolist(), shared.position_ids.tolist())
    expected = [(*p.token_ids, *c.token_ids)[:-1] for p, c in pairs if c.length]
    assert sorted(found) == sorted(expected)
    assert shared.longest == max(map(len, expected))
    if least == 1:  # a trie: no two branches of one begin alike
        assert len(shared.input_ids) <= len({each[: i + 1] for each in expected for i in range(len(each))}) + sum(
            len(p.token_ids) for p, _ in pairs
        )


def test_shared_instructions_prompts_and_beginnings_of_completions_are_stored_once():
    instructions, said = tuple(range(100, 120)), tuple(range(200, 218))
    a, b, other = _prompt(*instructions, 1), _prompt(*instructions, 2, 3), _prompt(*instructions[:9], 4)
    answers = [(a, (*said, 5, 6)), (b, (7, 8)), (other, (9,)), (a, (7,)), (a, (*said, 7, 8, 9))]
    batch = pack([(prompt, _completion(prompt, *ids)) for prompt, ids in answers])
    shared = share_prompts(batch.inputs)
    of_a = PromptGroup(1, (PromptGroup(18, (1, 2)), 0))
    assert shared.groups == (PromptGroup(20, (of_a, PromptGroup(2, (1,)))), PromptGroup(10, (0,)))
    assert len(shared.input_ids) == 20 + 1 + 18 + 1 + 2 + 2 + 1 + 10
    assert Packing(99, hidden_size=8).num_tokens(range(5), batch.inputs) == len(shared.input_ids)
    assert Packing(99, share_prompts=False).num_tokens(range(5), batch.inputs) == len(batch.inputs.input_ids)


def test_prompts_with_long_shared_instructions_are_packed_into_few_rows():
    prompts = [_prompt(*range(50), 100 + i) for i in range(6)]
    inputs = pack(
        [(p, _completion(p, *range(10 * i, 10 * i + 6))) for i, p in enumerate(prompts) for _ in range(2)]
    ).inputs
    rows = Packing(80, hidden_size=8).rows(range(12), inputs)
    assert sorted(s for row in rows for s in row) == list(range(12))
    # 50 tokens of instructions, then 1 of a prompt and 5 of each completion
    assert [Packing(80).num_tokens(row, inputs) for row in rows] == [50 + 2 * 11] * 3
    assert len(Packing(80, share_prompts=False, hidden_size=8).rows(range(12), inputs)) == 12


def test_a_row_scores_no_more_tokens_than_it_may_read_even_with_shared_prefixes():
    prompt = _prompt(1, 2)
    inputs = pack([(prompt, _completion(prompt, *range(30))) for _ in range(8)]).inputs  # a policy that repeats itself
    rows = Packing(70, hidden_size=8).rows(range(8), inputs)
    assert [len(row) for row in rows] == [2] * 4  # 31 tokens to read, 60 to score
    assert [Packing(70).num_tokens(row, inputs) for row in rows] == [31] * 4


def test_sequences_without_a_shared_prefix_are_returned_unchanged():
    a, b = _prompt(1), _prompt(2)
    batch = pack([(a, _completion(a, 3)), (b, _completion(b, 4))])
    assert share_prompts(batch.inputs) is batch.inputs


# --- rows by cost


def _block(groups: list[tuple[int, list[int]]]) -> tuple[list[list[int]], PackedInputs]:
    """Groups of (prompt tokens, scored tokens of each completion)."""
    pairs, members = [], []
    for number, (length, completions) in enumerate(groups):
        prompt = _prompt(*([number] * length))
        members.append(list(range(len(pairs), len(pairs) + len(completions))))
        pairs += [(prompt, _completion(prompt, *([i] * n))) for i, n in enumerate(completions)]
    return members, pack(pairs).inputs


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 8), st.lists(st.integers(0, 12), min_size=1, max_size=6)), min_size=1, max_size=8
    ),
    share=st.booleans(),
    by_cost=st.booleans(),
    room=st.integers(19, 60),
)
def test_rows_hold_every_scored_sequence_once_within_their_size_deterministically(groups, share, by_cost, room):
    members, inputs = _block(groups)
    packing = Packing(room, share_prompts=share, hidden_size=4 if by_cost else None)
    everyone = [s for group in members for s in group]
    rows = packing.rows(everyone, inputs)
    assert rows == packing.rows(everyone, inputs)
    assert sorted(s for row in rows for s in row) == [s for s in everyone if inputs.source_counts[s]]
    for row in rows:
        ids = torch.zeros(sum(inputs.lengths), dtype=torch.long)
        taken = replace(inputs, input_ids=ids, position_ids=ids).take(row)
        read = share_prompts(taken) if share else taken
        assert packing.num_tokens(row, inputs) == len(read.input_ids) <= room


def test_rows_are_as_few_as_in_order_and_their_costs_closer():
    _, inputs = _block([(64, [400, 30, 30, 30]), (64, [30] * 4), (64, [350, 40]), (64, [30] * 6)] * 4)
    everyone = list(range(len(inputs.lengths)))
    in_order, by_cost = Packing(1200), Packing(1200, hidden_size=64)

    def spread(packing: Packing) -> tuple[int, float]:
        costs = [by_cost.cost(row, inputs) for row in packing.rows(everyone, inputs)]
        return len(costs), max(costs) / min(costs)

    assert spread(by_cost)[0] <= spread(in_order)[0]
    assert spread(by_cost)[1] < 1.2 < spread(in_order)[1]


def test_a_group_longer_than_a_row_reads_its_prompt_once_in_each_of_the_fewest_rows():
    _, inputs = _block([(10, [11] * 6)])  # 10 + 6 * 10 tokens to read
    assert [len(row) for row in Packing(40, hidden_size=8).rows(range(6), inputs)] == [3, 3]


def test_long_attention_counts_in_a_rows_cost():
    _, inputs = _block([(1, [100]), (2, [50]), (3, [50])])  # 100, 51 and 52 tokens
    assert Packing(110, hidden_size=1).cost([0], inputs) == pytest.approx(100 + 100**2 / 12)
    pairs = [(4, [11, 21])]  # 4 + 10 + 20 tokens; 8 + (40 + 50) + (80 + 200) pairs
    _, shared = _block(pairs)
    assert Packing(110, hidden_size=1).cost([0, 1], shared) == pytest.approx(34 + 378 / 6)


# --- zero-advantage sequences


def test_zero_advantage_sequences_are_in_no_row():
    members, inputs = _block([(4, [3, 3]), (4, [3, 3])])
    live = [True, False, False, False]
    [step] = plan_epoch(members, inputs, tokens_per_step=99, packing=Packing(99), nonzero_advantage=live, seed=0)
    assert sorted(step.sequences) == [0, 1, 2, 3]
    assert (step.micro_batches, sorted(step.zero_advantage)) == (((0,),), [1, 2, 3])


def test_a_step_of_zero_advantages_trains_on_its_shortest_sequence():
    members, inputs = _block([(4, [3, 2, 0]), (4, [3, 3])])
    steps = plan_epoch(members, inputs, tokens_per_step=5, packing=Packing(99), nonzero_advantage=[False] * 5, seed=0)
    assert [len(step.micro_batches) for step in steps] == [1, 1]
    assert {step.micro_batches[0] for step in steps} == {(1,), (3,)}
