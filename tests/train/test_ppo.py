"""Whole small runs with a value head, and of the other estimators of returns: what they save, resume and learn."""

from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from logitless.train.learn.policy import Policy
from logitless.train.record.run_folder import RunFolder
from tests.train.interrupting import stopped_at
from tests.train.tiny import assert_same_run, blocks_of, completed, finished_run, start, steps_of, stored, tiny_recipe

PPO = {"algorithm": {"preset": "ppo"}, "kl": None, "data__held_out": None}
IN_REWARD = {"placement": "reward", "control": {"name": "fixed", "beta": 0.05}}
ONE_ROW = {"train__tokens_per_step": 1000, "train__tokens_per_micro_batch": 1000}


def _run(folder, **changes) -> RunFolder:
    return finished_run(folder, **{**PPO, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> RunFolder:
    return _run(tmp_path_factory.mktemp("finished"), kl=IN_REWARD)


def _value_heads(run: RunFolder) -> list[dict[str, torch.Tensor]]:
    """Of the first and the last checkpoint."""
    prefix = "parameter/value_head."
    return [{n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)} for tensors in stored(run)]


# --- numbers and files ----------------------------------------------------------------------------------------------


def test_the_values_of_a_block_are_those_its_first_step_starts_from(tmp_path):
    steps = steps_of(_run(tmp_path, train__tokens_per_step=1000))
    assert [record["value/clipped_fraction"] for record in steps[0::2]] == [0, 0, 0]  # V is V_old
    assert steps[0]["value/mean"] == steps[0]["value/explained_variance"] == 0
    assert 0 != steps[2]["value/mean"] != steps[4]["value/mean"]
    assert steps[0]["ratio/min"] == steps[0]["ratio/max"] == 1
    # the first return is lambda^(tokens to go) times the length, up to 6, so that its square over 2 is the loss
    assert 0 < steps[0]["value/return_mean"] <= 6
    assert steps[0]["loss/value"] >= steps[0]["value/return_mean"] ** 2 / 2


def test_the_scoring_pass_gives_the_values_and_the_reference_gives_none(tmp_path, monkeypatch):
    plain, calls = Policy.scores, []

    def scores(self, batch, **options):
        found = plain(self, batch, **options)
        calls.append((torch.is_grad_enabled(), found.value is not None))
        return found

    monkeypatch.setattr(Policy, "scores", scores)
    _run(tmp_path, **ONE_ROW, train__blocks=1, kl=IN_REWARD)
    assert calls == [(False, True), (False, False), (True, True), (True, True)]


def test_a_finished_run_leaves_a_plain_language_model_and_the_value_head_beside_it(finished):
    AutoModelForCausalLM.from_pretrained(finished.model)
    assert not any("value" in name for name in load_file(finished.model / "model.safetensors"))
    first, last = _value_heads(finished)
    assert {name: tuple(t.shape) for name, t in last.items()} == {"weight": (1, 16), "bias": (1,)}
    assert all((t == 0).all() for t in first.values())
    assert all((t != 0).any() for t in last.values())


def test_a_run_starts_from_the_value_head_of_another(finished, tmp_path):
    second = _run(tmp_path, value_head={"source": str(finished.value_head)}, train__blocks=1)
    for name, tensor in _value_heads(finished)[-1].items():
        assert torch.equal(tensor, _value_heads(second)[0][name])
    assert blocks_of(second)[0]["value/mean"] != 0


def test_a_run_that_was_stopped_ends_bitwise_as_one_that_was_not(finished, tmp_path):
    recipe = tiny_recipe(tmp_path, **{**PPO, "kl": IN_REWARD})
    stopped = stopped_at(3, recipe)
    completed(recipe, resume=True)
    assert_same_run(finished, stopped)
    assert stored(stopped)[-1].keys() > {"optimizer/value_head.weight/exp_avg_sq"}


# --- learning -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["ppo", "reinforce_pp"])
def test_completions_get_shorter_where_each_token_costs_1(tmp_path, preset):
    options = {"train__blocks": 12, "checkpoint__every_blocks": 99, "train__tokens_per_micro_batch": 1000}
    rewards = [{"name": "length", "cap": 6, "unit": "tokens", "weight": -1.0}]
    run = _run(tmp_path, **options, algorithm={"preset": preset}, rewards=rewards)
    means = [record["reward/mean"] for record in blocks_of(run)]
    assert means[0] < -4 < -2 < fmean(means[-3:])


# --- odd completions ------------------------------------------------------------------------------------------------


def test_values_are_not_fitted_where_nothing_could_be_scored(tmp_path):
    faulty = {"name": "function", "path": "tests.train.faulty_rewards:nothing"}
    run, _ = start(tiny_recipe(tmp_path, **PPO, rewards=[faulty], train__blocks=1))
    assert [record["loss/value"] for record in steps_of(run)] == [0] * len(steps_of(run))
    assert blocks_of(run)[0]["value/return_mean"] is None
    assert all((tensor == 0).all() for tensor in _value_heads(run)[-1].values())
