"""Pages and rows over random calls: all samples finish, no page leaks, and none is used twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.errors import ConfigurationError
from logitless.models.row_invariant.paged_attention import PAGE
from logitless.rollout.gpu.page_pool import Pool, PromptPages, pages_within
from logitless.rollout.gpu.schedule import Schedule

STEPS = 8


@st.composite
def calls(sample):
    lengths = sample(st.lists(st.integers(1, 5 * PAGE), min_size=1, max_size=8))
    num_samples, max_new = sample(st.integers(1, 5)), sample(st.integers(1, 3 * PAGE))
    needs = [PromptPages.of(n, max_new) for n in lengths]
    least = max(need.to_begin for need in needs)
    return {
        "lengths": lengths,
        "samples": [list(range(num_samples)) for _ in lengths],
        "max_new_tokens": max_new,
        "pool": Pool(least + sample(st.integers(0, 30))),
        "max_rows": sample(st.integers(1, 12)),
        "prefill_tokens": sample(st.integers(1, 200)),
        **sample(st.sampled_from([{}, {"unit": PAGE, "num_states": 1}, {"unit": PAGE, "num_states": 3}])),
    }, (sample(st.randoms(use_true_random=False)), sample(st.sampled_from([0, 0.1])))


@given(calls())
@settings(max_examples=150, deadline=None)
def test_every_sample_begins_once_and_ends_and_all_pages_come_back(call):
    options, (random, prefill_again) = call
    schedule, pool, lengths = Schedule(**options), options["pool"], options["lengths"]
    read = [0] * len(lengths)
    left, ended, rounds = {}, set(), 0
    waited = 0
    states, to_begin = {}, [set(samples) for samples in options["samples"]]
    while schedule.unfinished:
        rounds += 1
        before = len(ended)
        chunks = schedule.next_chunks()
        assert sum(r.length for r in chunks) <= max(options["prefill_tokens"], unit := options.get("unit", 1))
        for chunk in chunks:
            assert chunk.start == read[chunk.prompt]
            assert chunk.start % unit == 0
            if "num_states" in options:  # nobody else's until its samples have begun
                assert 0 <= chunk.state < options["num_states"]
                assert states.setdefault(chunk.state, chunk.prompt) == chunk.prompt
            assert chunk.start + chunk.length <= len(chunk.pages) * PAGE
            read[chunk.prompt] += chunk.length
        for row in schedule.begin():
            assert read[row.prompt] == lengths[row.prompt] - 1, "began before its prompt was read"
            assert (row.prompt, row.sample) not in left
            to_begin[row.prompt].remove(row.sample)
            if "num_states" in options and lengths[row.prompt] > 1:
                assert states[row.state] == row.prompt
                if not to_begin[row.prompt]:
                    del states[row.state]
            assert len(row.pages) * PAGE >= lengths[row.prompt] + options["max_new_tokens"] - 1
            left[row.prompt, row.sample] = random.randint(1, options["max_new_tokens"])
        if random.random() < prefill_again:
            schedule.prefill_again()
            read = [0 if to_begin[p] else length for p, length in enumerate(read)]
            states, before = {}, -1
        rows = schedule.rows
        assert len({row.slot for row in rows}) == len(rows) <= options["max_rows"]
        own = [page for row in rows for page in row.pages[row.shared :]]
        assert len(set(own)) == len(own)
        assert not set(own) & {page for row in rows for page in row.pages[: row.shared]}
        assert rows or chunks, "nothing to do, and yet unfinished"
        for row in list(rows):
            left[row.prompt, row.sample] -= STEPS
            if left[row.prompt, row.sample] <= 0:
                ended.add((row.prompt, row.sample))
                schedule.end(row)
        waited = 0 if len(ended) > before else waited + 1
        longest = sum(lengths) // options["prefill_tokens"] + len(lengths) + options["max_new_tokens"] // STEPS + 2
        assert waited <= longest, "starved"
    assert ended == {(p, g) for p, of in enumerate(options["samples"]) for g in of}
    assert pool.free == pool.num_pages
    assert schedule.rows == []


def test_a_row_that_ends_makes_room_at_once_and_the_longest_prompts_go_first():
    pool = Pool(40)
    schedule = Schedule([10, 200, 30], [[0, 1]] * 3, max_new_tokens=20, pool=pool, max_rows=3, prefill_tokens=1000)
    schedule.next_chunks()
    assert [(row.prompt, row.sample) for row in schedule.begin()] == [(1, 0), (1, 1), (2, 0)]
    schedule.end(schedule.rows[0])
    schedule.next_chunks()
    assert [(row.prompt, row.sample) for row in schedule.begin()] == [(2, 1)]


def test_samples_share_the_pages_that_their_prompt_fills_and_copy_the_one_that_it_ends_in():
    schedule = Schedule([2 * PAGE + 5], [[0, 1]], max_new_tokens=9, pool=Pool(9), max_rows=2, prefill_tokens=1000)
    [chunk] = schedule.next_chunks()
    a, b = schedule.begin()
    assert a.pages[:2] == b.pages[:2] == chunk.pages[:2]
    assert a.copy == (chunk.pages[2], a.pages[2])
    assert b.copy == (chunk.pages[2], b.pages[2])
    assert a.pages[2] != b.pages[2]


def test_a_page_is_given_back_once():
    pool = Pool(3)
    pages = pool.take(2)
    pool.give_back(pages)
    with pytest.raises(ValueError, match="not taken"):
        pool.give_back(pages)


def test_a_budget_without_room_for_one_completion_names_the_largest_settings_that_fit():
    prompts = [PromptPages.of(n, 200) for n in (10, 100)]
    with pytest.raises(ConfigurationError, match=r"6,000 bytes.*rollout.engine.memory to 6000.*at most 93"):
        pages_within(4500, 1000, [*prompts, PromptPages.of(100, 200)], [10, 100, 100], 200, num_samples=2, max_rows=4)
    fitting = PromptPages.of(100, 93)
    assert fitting.to_begin == 4
    assert PromptPages.of(100, 94).to_begin == 5
    assert pages_within(4500, 1000, [fitting], [100], 93, num_samples=2, max_rows=4) == 4
