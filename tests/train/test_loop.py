"""Whole small runs: what each setting does to the numbers that are written."""

import json
import math
from statistics import fmean

import pytest
import torch

from logitless.objective.presets import PRESETS
from logitless.rollout.transformers import TransformersEngine
from logitless.train.assembly.engines import open_engines
from logitless.train.learn.learner import Learner
from logitless.train.learn.policy import AdaptersOff, Policy
from logitless.train.record.run_folder import RunFolder
from logitless.train.report.page import write_report
from logitless.types import Completion
from tests.train.engines import Scripted, trained_with
from tests.train.interrupting import before
from tests.train.tiny import ONE_STEP, SHORT, assert_equal, blocks_of, finished_run, recorded_engine, steps_of, stored

FIXED = {"name": "fixed", "beta": 0.1}
BLOCK = {"data__held_out": None, "train__blocks": 1}
TWO_BLOCKS = {"data__held_out": None, "train__blocks": 2}


def _run(folder, answers=None, **changes) -> RunFolder:
    """A run, whose sampler says what ``answers`` gives."""
    opening = open_engines if answers is None else trained_with(Scripted(answers))
    return finished_run(folder, open_engines=opening, **changes)


def _rows(run: RunFolder) -> list[dict]:
    return [row for _, rows in run.read_rollouts() for row in rows]


@pytest.fixture
def asked(monkeypatch):
    """What the policy's engine was asked for: prompts, samples of each, temperature, most tokens."""
    asked = []

    def noted(_, prompts, num_samples, options, **__):
        asked.append((len(prompts), num_samples, options.temperature, options.max_new_tokens))

    before(monkeypatch, TransformersEngine, "sample", noted)
    return asked


# --- ratio and scoring ----------------------------------------------------------------------------------------------


def test_the_first_step_of_every_block_has_ratio_exactly_1_over_several_micro_batches(tmp_path):
    steps = steps_of(_run(tmp_path, **TWO_BLOCKS, train__tokens_per_step=1000, train__tokens_per_micro_batch=16))
    assert len(steps) == 4
    for first in steps[0::2]:
        assert first["optimizer/micro_batches"] > 2
        assert first["ratio/min"] == first["ratio/mean"] == first["ratio/max"] == 1
    for second in steps[1::2]:
        assert second["ratio/min"] < 1 < second["ratio/max"]
    assert steps[0]["kl_ref/k3_mean"] == 0 < steps[2]["kl_ref/k3_mean"]


def test_the_policy_is_scored_once_a_block_whatever_the_number_of_epochs(tmp_path, monkeypatch):
    calls = []

    def noted(policy, *_, **__):
        calls.append((torch.is_grad_enabled(), next(policy.model.parameters()).requires_grad))

    before(monkeypatch, Policy, "scores", noted)
    _run(tmp_path, **BLOCK, **ONE_STEP, train__epochs_per_block=3, kl={"placement": "loss", "control": FIXED})
    policy, reference, training = (False, True), (False, False), (True, True)
    assert calls == [policy, reference, training, training, training]


# --- groups ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_signal", ["keep", "drop"])
def test_groups_without_a_signal_are_counted_and_kept_or_left_out(tmp_path, zero_signal):
    changes = {**SHORT, "rollout__zero_signal": zero_signal, "rollout__prompts_per_block": 8}
    run = _run(tmp_path, lambda text, i: "aa" if text[0] in "abcd" else "a" * (1 + i), **changes)
    (block,) = blocks_of(run)
    assert block["group/zero_signal_fraction"] == 0.5
    trained = 8 if zero_signal == "keep" else 4
    assert (block["group/trained"], block["group/dropped"], block["group/refill_rounds"]) == (trained, 8 - trained, 0)
    assert sum(record["optimizer/sequences"] for record in steps_of(run)) == 4 * trained
    without = [row["advantage"] for row in _rows(run) if row["prompt"][0] in "abcd"]
    assert without == [0.0 if zero_signal == "keep" else None] * 16


def alike(_text, i):
    return "ab"[i % 2] * 2


def test_a_run_of_which_no_completion_has_an_advantage_says_so_once_and_in_its_summary(tmp_path, capsys):
    run = _run(tmp_path, alike, **TWO_BLOCKS, kl=None)
    assert [record["optimizer/grad_norm"] for record in steps_of(run)] == [0.0] * len(steps_of(run))
    assert json.loads(run.summary.read_text())["blocks_with_signal"] == 0
    [said] = [line for line in capsys.readouterr().out.splitlines() if "nothing can be learned" in line]
    assert said.startswith("block 1: rewards give no completion an advantage")


def test_what_is_learned_by_other_means_than_a_difference_in_a_group_is_not_called_nothing(tmp_path, capsys):
    raw, imitation = {"algorithm": {"advantage": {"name": "raw"}}}, {"algorithm": {"preset": "nll"}}
    for number, (answers, changes, blocks) in enumerate(
        ((lambda _, i: "a" * (1 + i), {}, 2), (alike, raw, 2), (alike, imitation, None))
    ):
        (folder := tmp_path / str(number)).mkdir()
        run = _run(folder, answers, **TWO_BLOCKS, kl=None, **changes)
        assert json.loads(run.summary.read_text()).get("blocks_with_signal") == blocks
    assert "nothing can be learned" not in capsys.readouterr().out


def test_truncated_completions_can_be_dropped_from_the_loss(tmp_path):
    def answers(text, i):
        return "a" * (1 + i % 2) if i else "h" * 6  # the first of each group is cut

    options = {**SHORT, "algorithm": {"preset": "dapo"}, "train__tokens_per_step": 1000}
    run = _run(tmp_path, answers, **options, train__drop_truncated=True)
    assert steps_of(run)[0]["optimizer/tokens"] == 4 * (2 + 1 + 2)
    assert blocks_of(run)[0]["length/truncated_fraction"] == 0.25
    assert _rows(run)[0]["advantage"] > 0  # it still counts in its group


def test_a_step_whose_completions_are_all_dropped_has_no_gradient_and_no_token(tmp_path):
    run = _run(tmp_path, lambda text, i: "ab"[i % 2] * 6, **SHORT, train__drop_truncated=True)  # all are cut
    for record in steps_of(run):
        assert (record["optimizer/tokens"], record["optimizer/grad_norm"], record["loss/total"]) == (0, 0, 0)
    assert_equal(*_trained(run))


# --- KL and entropy -------------------------------------------------------------------------------------------------


def test_kl_in_the_reward_changes_advantages_and_no_loss_term(tmp_path):
    kl = {"placement": "reward", "control": {"name": "fixed", "beta": 5.0}}
    changes = {**TWO_BLOCKS, "train__epochs_per_block": 1}
    run, plain = (
        _run(tmp_path / str(i), lambda text, i: "ab"[i % 2] * (1 + i), **changes, kl=each)
        for i, each in enumerate((kl, None))
    )
    first, second = ([row["advantage"] for row in _rows(each)] for each in (run, plain))
    assert first[:16] == second[:16]  # the policy is still its reference
    assert first[16:] != second[16:]
    steps = steps_of(run)
    assert all("kl_ref/penalty_mean" not in record for record in steps)
    assert steps[0]["kl_ref/controlled"] == 0
    assert all(record["kl_ref/beta"] == 5.0 for record in steps)


def test_without_a_kl_there_is_no_reference(tmp_path, monkeypatch):
    monkeypatch.setattr("logitless.train.assembly.policies.frozen_copy", None)
    assert not any(name.startswith("kl_ref") for record in steps_of(_run(tmp_path, **SHORT)) for name in record)


def test_the_controlled_kl_is_that_of_the_chosen_estimator_and_a_coefficient_at_its_bounds_is_counted(tmp_path):
    control = {"name": "linear", "beta": 1.0, "gain": 100.0, "target": 0.5, "beta_min": 0.9, "guardrail": None}
    kl = {"placement": "loss", "control": control, "penalty": {"estimator": "k2"}}
    steps = steps_of(_run(tmp_path, **BLOCK, kl=kl))
    for record in steps:
        assert record["kl_ref/controlled"] == record["kl_ref/k2_mean"] == record["kl_ref/penalty_mean"]
    assert [record["kl_ref/beta"] for record in steps] == [1.0] + [0.9] * (len(steps) - 1)
    assert [record["kl_ref/bounded"] for record in steps] == list(range(1, len(steps) + 1))


def test_the_guardrail_shortens_the_next_rollout_and_is_counted(tmp_path, asked):
    control = {"name": "proportional", "beta": 0.1, "target": 1e-6, "guardrail": "shorten_rollout"}
    kl = {"placement": "loss", "control": control, "update": "epoch"}
    run = _run(tmp_path, data__held_out=None, train__blocks=3, kl=kl)
    assert [most for *_, most in asked] == [6, 3, 3]
    assert [record["length/max"] for record in blocks_of(run)][1:] == [3, 3]
    assert steps_of(run)[-1]["kl_ref/guarded"] == 5  # the last epoch's update comes after its last step


def test_filters_corrections_and_choices_of_a_block_run_together_and_an_entropy_bonus_adapts(tmp_path):
    adaptive = {"target": 100.0, "delta": 0.25}  # entropy is always below: more and more of it is paid for
    algorithm = {
        "preset": "dapo",
        "filters": [{"name": "top_entropy", "quantile": 0.5}, {"name": "off_policy", "threshold": 0.5}],
        "correction": {"level": "token", "max": 2.0},
        "entropy_bonus": {"coefficient": 0.0, "scope": "micro_batch", "adaptive": adaptive},
        "weighting": {"name": "token_mean", "scope": "block"},
    }
    steps = steps_of(_run(tmp_path, **BLOCK, algorithm=algorithm))
    assert 0.2 < fmean(record["filter/top_entropy/dropped_fraction"] for record in steps) < 0.8
    assert all(record["sampler/correction_mean"] == pytest.approx(1, abs=0.05) for record in steps)
    assert [record["entropy/bonus_coefficient"] for record in steps] == [0.0, 0.25, 0.5, 0.75]


# --- engines, evaluation, LoRA --------------------------------------------------------------------------------------


def test_held_out_prompts_are_sampled_with_settings_of_their_own(tmp_path, asked):
    sampling = {"max_new_tokens": 2, "temperature": 0.5}
    evaluation = {"every_blocks": 2, "samples_per_prompt": 3, "sampling": sampling, "success_at": 2.0}
    run = _run(tmp_path, kl=None, train__blocks=3, train__epochs_per_block=1, evaluation=evaluation)
    training, held_out = (4, 4, 1.0, 6), (1, 3, 0.5, 2)
    assert asked == [held_out, training, training, held_out, training, held_out]
    evaluated = [record for record in run.read_metrics() if "evaluation/accuracy" in record]
    assert [record["block"] for record in evaluated] == [1, 2, 3]
    assert evaluated[0]["step"] == 0
    assert all(record["evaluation/length_mean"] <= 2 for record in evaluated)


def test_recorded_completions_are_trained_on_while_the_policy_is_evaluated_greedily(tmp_path, asked):
    completions = [Completion(str(prompt), (3,) * n, "a" * n, "stop") for prompt in range(8) for n in (1, 2, 3, 4)]
    engine = recorded_engine(tmp_path, completions)
    run = _run(tmp_path, kl=None, train__blocks=2, train__epochs_per_block=1, rollout__engine=engine)
    assert [record["reward/mean"] for record in blocks_of(run)] == [2.5, 2.5]
    first = steps_of(run)[0]
    assert first["ratio/max"] == 1
    assert first["sampler/missing"] == first["optimizer/tokens"]
    assert "evaluation/accuracy" in run.read_metrics()[-1]
    assert [temperature for _, _, temperature, _ in asked] == [0.0, 0.0]


def test_lora_trains_the_adapter_against_its_own_base_model(tmp_path, monkeypatch):
    references = []
    before(monkeypatch, Learner, "__init__", lambda *arguments, **_: references.append(arguments[4]))
    run = _run(tmp_path, **TWO_BLOCKS, model__lora={"rank": 2, "targets": ["q_proj", "down_proj"]})
    (reference,) = references
    assert isinstance(reference, AdaptersOff)
    steps = steps_of(run)
    assert steps[0]["kl_ref/k3_mean"] == 0 < steps[-1]["kl_ref/k3_mean"]
    begun, after = _trained(run)
    assert all("lora_" in name for name in begun)
    assert any(not torch.equal(begun[name], after[name]) for name in begun)


def test_under_dropout_the_block_is_scored_without_it_and_numbers_are_the_seeds(tmp_path):
    lora = {"rank": 2, "targets": ["q_proj", "down_proj"], "dropout": 0.5}
    once = {**TWO_BLOCKS, "kl": None, "train__epochs_per_block": 1, "train__tokens_per_step": 10**6}
    steps, again = (steps_of(_run(tmp_path / str(i), **once, model__lora=lora)) for i in range(2))
    assert steps[0]["ratio/max"] == 1  # B is 0 at first, whatever its inputs
    assert steps[1]["ratio/max"] > 1 > steps[1]["ratio/min"]
    names = ("loss/total", "ratio/max", "optimizer/grad_norm")
    assert [[step[name] for name in names] for step in again] == [[step[name] for name in names] for step in steps]


def test_modules_to_save_are_trained_beside_the_factors_with_master_weights(tmp_path):
    lora = {"rank": 2, "targets": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}
    dtypes = {"model__dtype": "bfloat16", "model__trained_dtype": "bfloat16"}
    run = _run(tmp_path, **TWO_BLOCKS, model__lora=lora, **dtypes)
    before, after = _trained(run)
    whole = [name for name in before if "modules_to_save" in name]
    assert len(whole) == 4  # the names of two more norms end in this one
    assert all(before[name].dtype == torch.float32 and not torch.equal(before[name], after[name]) for name in whole)
    assert steps_of(run)[0]["kl_ref/k3_mean"] == 0 < steps_of(run)[-1]["kl_ref/k3_mean"]


def _trained(run: RunFolder):
    """What is trained, in the first and in the last checkpoint."""
    return [{name: t for name, t in tensors.items() if name.startswith("parameter/")} for tensors in stored(run)]


def test_every_metric_of_a_run_is_finite_and_a_report_and_a_summary_are_left(tmp_path, monkeypatch):
    monkeypatch.setattr("logitless.train.run.write_report", write_report)
    run = _run(tmp_path, train__blocks=2)
    assert "<html" in run.report.read_text()
    summary, records = json.loads(run.summary.read_text()), run.read_metrics()
    assert (summary["blocks"], summary["steps"], summary["skipped_steps"]) == (2, len(steps_of(run)), 0)
    assert {"accuracy_before", "accuracy_after", "reward_first_block", "reward_last_block"} < set(summary)
    for record in records:
        assert all(value is not None and math.isfinite(value) for value in record.values()), record
    assert [record["step"] for record in records] == list(range(len(steps_of(run)) + 1))


# --- every preset ---------------------------------------------------------------------------------------------------


FEW = ("gspo", "pass_at_k", "ppo", "reinforce_pp")
ELSEWHERE = {"a2po", "echo"}  # test_columns_and_observations.py
OF_COLUMNS = {
    "rae": {"name": "rae", "columns": ["answer"]},
    "hierarchical_grpo": {"name": "hierarchical", **dict.fromkeys(("role", "task", "problem"), "answer")},
}


@pytest.mark.parametrize(
    "preset",
    [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in sorted(PRESETS.keys() - ELSEWHERE)],
)
def test_every_preset_trains_and_moves_the_weights(tmp_path, preset):
    changes = {"algorithm": {"preset": preset}}
    if preset in OF_COLUMNS:
        changes["algorithm"]["advantage"] = OF_COLUMNS[preset]
    if preset == "pass_at_k":  # its rewards are right or wrong; sets of one have a signal in most groups of four
        changes["algorithm"]["parameters"] = {"k": 1}
        changes["rewards"] = [{"name": "length", "cap": 6, "weight": 1 / 6}]
    run = _run(tmp_path, **BLOCK, **changes)
    steps = steps_of(run)
    assert len(steps) == 4
    assert all(math.isfinite(record["loss/total"]) for record in steps)
    first, last = _trained(run)
    assert any(not torch.equal(first[name], last[name]) for name in first)
