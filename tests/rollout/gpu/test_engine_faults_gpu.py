"""The engine with graphs at its limits and under faults gives the same completions as undisturbed."""

import logging
from collections import Counter

import pytest
import torch

from logitless.rollout.engine import Weights
from logitless.rollout.gpu import page_memory, steps
from logitless.rollout.gpu.page_memory import PageMemory
from logitless.rollout.gpu.steps import Steps
from logitless.rollout.sampling import SamplingOptions
from logitless.train.learn.policy import Policy
from logitless.types import Prompt
from tests.rollout.gpu.wide import engine_of, wide_model
from tests.rollout.plain_forward import policy_logp, trainers_scores

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ordinary_memory")]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 2000}
SIZES |= {"max_position_embeddings": 40000}
OPTIONS = SamplingOptions(max_new_tokens=20)


@pytest.fixture(scope="module")
def model():
    return wide_model(**SIZES)


def prompts_of(count, length=70):
    ids = torch.randint(3, 2000, (count, length), generator=torch.Generator().manual_seed(count)).tolist()
    return [Prompt(str(i), "", tuple(row[: length - i % 9])) for i, row in enumerate(ids)]


def test_2048_rows_give_what_a_few_at_once_give(model):
    prompts = prompts_of(256)
    many = engine_of(model, max_rows=2048).sample(prompts, 8, OPTIONS, seed=1)
    few = engine_of(model, max_rows=24).sample(prompts[100:110], 8, OPTIONS, seed=1)
    one = engine_of(model, max_rows=1).sample(prompts[7:8], 1, OPTIONS, seed=1)
    assert few == many[100:110]
    assert one[0] == many[7][:1]


def test_at_32_thousand_positions_every_token_has_the_trainers_bits(model):
    prompts = [*prompts_of(1, 32_700), *[Prompt("short", "", (5, 6, 7))]]
    groups = engine_of(model).sample(prompts, 3, SamplingOptions(max_new_tokens=70), seed=1)
    assert trainers_scores(Policy(model), prompts, groups, temperature=1.0).logp.tolist() == policy_logp(groups)
    assert len(prompts[0].token_ids) + max(c.length for c in groups[0]) > 32_700


@pytest.mark.parametrize("where", ["while a graph is captured", "while graphs are replayed"])
def test_ctrl_c_leaves_an_engine_that_samples_as_before(model, monkeypatch, where):
    engine, prompts = engine_of(model), prompts_of(4)
    expected = engine_of(model).sample(prompts, 3, OPTIONS, seed=1)
    sample, run, calls = steps.sample_tokens, Steps.run, []

    def in_capture(*arguments):
        if torch.cuda.is_current_stream_capturing():
            raise KeyboardInterrupt
        return sample(*arguments)

    def in_replay(*arguments):
        wait = run(*arguments)
        calls.append(wait)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return wait

    with monkeypatch.context() as patch:
        if where == "while a graph is captured":
            patch.setattr(steps, "sample_tokens", in_capture)
        else:
            patch.setattr(Steps, "run", in_replay)
        with pytest.raises(KeyboardInterrupt):
            engine.sample(prompts, 3, OPTIONS, seed=1)
    assert engine.sample(prompts, 3, OPTIONS, seed=1) == expected


def test_where_the_device_has_no_memory_for_the_pages_rows_are_fewer_and_tokens_the_same(model, monkeypatch, caplog):
    prompts = prompts_of(16)
    expected = engine_of(model).sample(prompts, 4, OPTIONS, seed=1)
    give, sizes = PageMemory._map, []

    def scarce(self, size):
        sizes.append(size)
        if size > 4 * 2**20:
            raise torch.OutOfMemoryError("no room")
        give(self, size)

    monkeypatch.setattr(PageMemory, "_map", scarce)
    long = SamplingOptions(max_new_tokens=2000, stop_token_ids=tuple(range(3, 500)))
    with caplog.at_level(logging.WARNING, "logitless"):
        engine = engine_of(model)
        found = engine.sample(prompts, 4, long, seed=1)
    lowered = caplog.text.count("going on with at most")
    refused = [size for size in sizes if size > 4 * 2**20]
    assert lowered > 0
    assert refused == [size for size in sorted(set(refused), reverse=True) for _ in range(2)]  # each asked for twice
    assert len(refused) == 2 * lowered
    assert sizes[-1] <= 4 * 2**20
    monkeypatch.undo()
    assert found == engine_of(model).sample(prompts, 4, long, seed=1)
    assert engine.sample(prompts, 4, OPTIONS, seed=1) == expected


def test_a_model_that_went_to_the_host_and_back_is_sampled_as_before():
    moving = wide_model(**SIZES)
    engine, prompts = engine_of(moving), prompts_of(4)
    expected = engine.sample(prompts, 3, OPTIONS, seed=1)
    moving.cpu()
    keep = torch.empty(2**26, device="cuda")  # where the weights were
    moving.cuda()
    engine.load(Weights.of(moving), 0)
    assert engine.sample(prompts, 3, OPTIONS, seed=1) == expected
    del keep


def test_nothing_of_the_pages_is_left_after_a_call(model, monkeypatch):
    """Counted in calls of the driver: the device's free memory depends on other processes too."""
    driver, asked = page_memory._driver, Counter()

    def counted(name, *arguments):
        driver(name, *arguments)
        asked[name] += 1

    monkeypatch.setattr(page_memory, "_driver", counted)
    engine, prompts = engine_of(model), prompts_of(64)
    for seed in range(4):
        engine.sample(prompts, 8, OPTIONS, seed=seed)
        counts = {asked[name] for name in ("cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap")}
        assert len(counts) == 1
        assert min(counts) >= (seed + 1) * engine._steps.memory.parts
    assert not engine._steps.memory._mapped
