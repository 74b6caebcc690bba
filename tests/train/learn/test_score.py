"""Scores in the block's order, equal to full logits.

Those of an engine that is bitwise identical spare the pass, and a rescore that differs ends the run.
"""

import shutil
from dataclasses import replace

import pytest
import torch

from logitless.data.packing import pack
from logitless.errors import EngineError, TrainingError
from logitless.head import fused
from logitless.models.loading import load_model
from logitless.rollout.gpu import steps
from logitless.rollout.gpu.engine import GpuEngine
from logitless.rollout.sampling import SamplingOptions
from logitless.train import loop
from logitless.train.learn.policy import Policy
from logitless.train.learn.score import check_same, check_sampler_logp, sampled_scores, scores_of
from logitless.train.plan.run_plan import plan_of
from logitless.train.store.checkpoint import checkpoints
from logitless.types import Completion, Group, Prompt, TokenScores
from tests.head.interpreter import complete_interpreter, interpreted
from tests.models.kernels.exact_products import sum_products_in_float64
from tests.train.interrupting import before
from tests.train.tiny import TINY_GPT2, finished_run, start, steps_of, tiny_raw, tiny_recipe, warm_start

pytest.importorskip("triton")


def test_scores_come_back_in_the_blocks_order_however_the_rows_are_laid():
    dropout = {f"{part}_pdrop": 0.0 for part in ("resid", "embd", "attn")}
    policy = Policy(load_model(TINY_GPT2 | dropout, random_weights=True, seed=1))
    pairs = []
    for s, (prompt, answer) in enumerate([((1,), (4, 5, 6)), ((1, 2), ()), ((3, 4, 5), (7,)), ((2,), (8, 9))]):
        pairs.append((Prompt(str(s), "", prompt), Completion(str(s), answer, "", "stop")))
    found = scores_of(policy, pack(pairs), [(3, 0), (2,)], temperature=2.0, backend="reference", sum_squares=True)
    expected = []
    for prompt, completion in pairs:
        ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
        with torch.no_grad():
            rows = (policy.model(ids).logits[0] / 2.0).log_softmax(-1)
        for j, token in enumerate(completion.token_ids):
            row = rows[len(prompt.token_ids) - 1 + j]
            expected.append((float(row[token]), float(-(row.exp() * row).sum()), float(row.exp().square().sum())))
    assert found.logp.tolist() == pytest.approx([e[0] for e in expected], abs=1e-5)
    assert found.entropy.tolist() == pytest.approx([e[1] for e in expected], abs=1e-5)
    assert found.sum_squares.tolist() == pytest.approx([e[2] for e in expected], abs=1e-5)


SMALL = {
    "model__layers": "row_invariant", "rollout__engine": {"name": "gpu", "rescore_every": 2},
    "rollout__prompts_per_block": 2, "rollout__completions_per_prompt": 2, "rollout__sampling": {"max_new_tokens": 3},
    "train__epochs_per_block": 1, "train__tokens_per_step": 1000, "data__held_out": None, "kl": None,
}  # fmt: skip


def group(version=3, logp=(-0.5, 0.0), entropy=(1.0, 0.0), trained=(True, False)):
    completion = Completion("7", (4, 5), "ab", "stop", logp, trained, None, version, entropy)
    return [Group(Prompt("7", "", (4,)), (completion,), ({},), (1.0,))]


PLAIN = SamplingOptions(max_new_tokens=3)


def test_scores_are_those_of_trained_tokens():
    scores = sampled_scores(group(), PLAIN, version=3, exact=True)
    assert (scores.logp.tolist(), scores.entropy.tolist()) == ([-0.5], [1.0])


def test_with_filters_the_scores_are_those_of_the_policys_own_softmax():
    [of] = group()
    filtered = [replace(of, completions=(replace(of.completions[0], logp_policy=(-0.75, 0.0)),))]
    scores = sampled_scores(filtered, SamplingOptions(max_new_tokens=3, top_p=0.9), version=3, exact=True)
    assert scores.logp.tolist() == [-0.75]


@pytest.mark.parametrize(
    ("groups", "exact", "options", "version"),
    [
        (group(), True, SamplingOptions(max_new_tokens=3, top_p=0.9), 3),
        (group(), True, SamplingOptions(max_new_tokens=3, temperature=0.0), 3),
        (group(), True, PLAIN, 4),
        (group(logp=None), True, PLAIN, 3),
        (group(entropy=None), True, PLAIN, 3),
        (group(), False, PLAIN, 3),
    ],
)
def test_a_pass_is_made_where_the_sampler_does_not_say_what_the_policy_says(groups, exact, options, version):
    assert sampled_scores(groups, options, version=version, exact=exact) is None


def test_log_probs_that_the_algorithm_reads_must_be_there():
    with pytest.raises(EngineError, match=r"logp_sampler.*None in all 1 completions"):
        check_sampler_logp([Completion("a", (6,), "6", "stop"), Completion("b", (), "", "stop")])
    check_sampler_logp([Completion("a", (6,), "6", "stop"), Completion("b", (6,), "6", "stop", logp_sampler=(-0.5,))])
    check_sampler_logp([])


def test_one_bit_ends_the_run():
    a = TokenScores(torch.tensor([-0.5, -0.25]), torch.ones(2))
    assert check_same(a, a) == 0
    b = TokenScores(torch.nextafter(a.logp, torch.zeros(2)), a.entropy)
    with pytest.raises(TrainingError, match="2 of 2 tokens that differ"):
        check_same(a, b)


@pytest.fixture
def interpreted_head(monkeypatch):
    if not interpreted():
        pytest.skip("needs Triton's interpreter")
    complete_interpreter()
    sum_products_in_float64()
    monkeypatch.setattr(fused, "why_not", fused._unsupported)
    monkeypatch.setattr(steps, "STEPS", 3)


def test_a_run_scores_only_where_it_is_checked_and_evaluates_with_the_same_engine(
    tmp_path, monkeypatch, interpreted_head
):
    passes, calls, sample = [], [], GpuEngine.sample

    def noted(self, prompts, num_samples, options, *, seed):
        found = sample(self, prompts, num_samples, options, seed=seed)
        calls.append((self, options.temperature, max(c.length for group in found for c in group)))
        return found

    before(monkeypatch, Policy, "scores", lambda *_, **__: passes.append(torch.is_grad_enabled()))
    monkeypatch.setattr(GpuEngine, "sample", noted)
    changes = {"data__held_out": tiny_raw(tmp_path)["data"]["held_out"], "train__skip_zero_advantage": False}
    changes["evaluation"] = {"every_blocks": 9, "sampling": {"max_new_tokens": 2, "temperature": 0.0}}
    lines = steps_of(finished_run(tmp_path, **SMALL | changes, train__blocks=2))
    assert [line.get("sampler/mismatched_tokens") for line in lines] == [0, None]
    assert [line["sampler/exact"] for line in lines] == [1, 1]
    assert passes == [False, True, True]
    for line in lines:
        assert line["sampler/logp_difference_max"] == line["kl_old/k1_mean"] == 0
    assert [temperature for _, temperature, _ in calls] == [0.0, 1.0, 1.0, 0.0]
    assert len({engine for engine, *_ in calls}) == 1
    assert calls[0][2] <= 2 < calls[1][2]


def test_each_block_is_exact_if_its_own_sampling_was_also_after_a_resume(tmp_path, monkeypatch, interpreted_head):
    sampled = []

    def is_exact_of(**changes):
        run = finished_run(tmp_path, **SMALL, train__blocks=2, rollout__staleness=1, **changes)
        for path in checkpoints(run.checkpoints)[1:]:
            shutil.rmtree(path)
        sampled.clear()
        return [line["sampler/exact"] for line in steps_of(run)]

    before(monkeypatch, GpuEngine, "sample", lambda *_, **__: sampled.append(None))
    monkeypatch.setattr(GpuEngine, "exact", property(lambda _: len(sampled) < 2))
    assert is_exact_of() == [1, 0]  # both were sampled before the first was trained on
    assert is_exact_of(resume=True) == [1, 0]
    monkeypatch.setattr(GpuEngine, "exact", False)  # as of layers that are sharded now
    assert is_exact_of(resume=True) == [0, 0]


@pytest.mark.slow
def test_a_run_with_filters_leaves_the_pass_out_too(tmp_path, interpreted_head):
    filtered = {"rollout__sampling": {"max_new_tokens": 3, "top_k": 2}, "train__blocks": 2}
    lines = steps_of(start(tiny_recipe(tmp_path, **SMALL | filtered))[0])
    assert [line.get("sampler/mismatched_tokens") for line in lines] == [0, None]
    assert [line["sampler/exact"] for line in lines] == [1, 1]


def test_a_sampler_that_is_not_bitwise_identical_ends_the_run(tmp_path, monkeypatch, interpreted_head):
    said = loop.sampled_scores

    def otherwise(*arguments, **options):
        found = said(*arguments, **options)
        return TokenScores(torch.nextafter(found.logp, torch.zeros_like(found.logp)), found.entropy)

    monkeypatch.setattr(loop, "sampled_scores", otherwise)
    with pytest.raises(TrainingError, match="tokens that differ"):
        start(tiny_recipe(tmp_path, **SMALL, train__blocks=1))


def test_a_dry_run_opens_the_engine_on_a_model_without_weights(tmp_path):
    assert plan_of(tiny_recipe(tmp_path, **SMALL)).total_bytes > 0


@pytest.mark.slow
def test_a_lora_run_with_a_warm_start_samples_what_it_trains(tmp_path, interpreted_head):
    warm = warm_start(tmp_path, steps=1, sequences_per_step=2)
    run = finished_run(tmp_path, **SMALL, model__lora={"rank": 2, "alpha": 4.0}, warm_start=warm, train__blocks=1)
    assert steps_of(run)[0]["sampler/mismatched_tokens"] == 0
