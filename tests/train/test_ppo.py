"""Whole small runs with a value head, and of the other estimators of returns: what they save, resume and learn."""

import math
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from logitless.rollout.recorded import write_completions
from logitless.train.learn.policy import Policy
from logitless.train.record.run_folder import RunFolder
from logitless.train.run import start
from logitless.types import Completion
from tests.train.interrupting import stop_at
from tests.train.tiny import assert_same_run, blocks_of, steps_of, stored, tiny_recipe

PPO = {"algorithm": {"preset": "ppo"}, "kl": None, "data__held_out": None}
IN_REWARD = {"placement": "reward", "control": {"name": "fixed", "beta": 0.05}}
ONE_ROW = {"train__tokens_per_step": 1000, "train__tokens_per_micro_batch": 1000}


def _run(folder, **changes) -> RunFolder:
    run, complete = start(tiny_recipe(folder, **{**PPO, **changes}))
    assert complete
    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> RunFolder:
    return _run(tmp_path_factory.mktemp("finished"), kl=IN_REWARD)


def _value_heads(run: RunFolder) -> list[dict[str, torch.Tensor]]:
    """Of the first and the last checkpoint."""
    prefix = "parameter/value_head."
    found = []
    for tensors in stored(run):
        found.append({name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)})
    return found


def _recorded(folder, completions) -> dict:
    """Changes for a recipe that trains on these completions."""
    tiny_recipe(folder)
    write_completions(folder / "recorded.jsonl", completions)
    return {"rollout__engine": {"name": "recorded", "path": str(folder / "recorded.jsonl")}}


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


def test_a_run_that_was_stopped_ends_bitwise_as_one_that_was_not(finished, tmp_path, monkeypatch):
    recipe = tiny_recipe(tmp_path, **{**PPO, "kl": IN_REWARD})
    with monkeypatch.context() as patched:
        stop_at(3, patched)
        stopped, complete = start(recipe)
    assert not complete
    assert start(recipe, resume=True)[1]
    assert_same_run(finished, stopped)
    assert stored(stopped)[-1].keys() > {"optimizer/value_head.weight/exp_avg_sq"}


# --- learning -------------------------------------------------------------------------------------------------------


def test_the_value_head_learns_which_prompts_are_worth_more(tmp_path):
    # Completions of 2 tokens for the first four prompts and of 5 for the others; a token is worth 1.
    completions = [
        Completion(str(p), (3,) * n, "a" * n, "stop") for p in range(8) for n in [2 if p < 4 else 5] for _ in range(4)
    ]
    run = _run(
        tmp_path,
        **_recorded(tmp_path, completions),
        algorithm={"preset": "ppo", "advantage": {"name": "gae", "lambda_": 1.0}, "value_loss": {"clip": None}},
        rollout__prompts_per_block=8,
        train__blocks=25,
        train__epochs_per_block=4,
        **ONE_ROW,
        checkpoint__every_blocks=25,
    )
    first, last = blocks_of(run)[0], blocks_of(run)[-1]
    assert first["value/explained_variance"] == 0
    # each token's return is its completion's length: (4 * 2 * 2 + 4 * 5 * 5) / (4 * 2 + 4 * 5) in the mean
    assert first["value/return_mean"] == last["value/return_mean"] == pytest.approx(116 / 28)
    assert last["value/explained_variance"] > 0.8
    assert last["value/mean"] == pytest.approx(116 / 28, abs=0.3)
    assert last["loss/value"] < 0.1 * first["loss/value"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"algorithm": {"preset": "reinforce_pp"}},
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                {"kl": IN_REWARD},
                {"rollout__completions_per_prompt": 1, "rollout__prompts_per_block": 8},
                {"algorithm": {"preset": "reinforce_pp"}, "kl": IN_REWARD},
                {"algorithm": {"preset": "reinforce", "advantage": {"name": "reinforce_pp_baseline"}}, "kl": IN_REWARD},
                {
                    "algorithm": {"preset": "reinforce"},
                    "kl": IN_REWARD,
                    "train__epochs_per_block": 1,
                    "train__blocks": 20,
                },
            )
        ),
    ],
    ids=str,
)
def test_completions_get_shorter_where_each_token_costs_1(tmp_path, changes):
    options = {"train__blocks": 12, "checkpoint__every_blocks": 99, "train__tokens_per_micro_batch": 1000, **changes}
    rewards = [{"name": "length", "cap": 6, "unit": "tokens", "weight": -1.0}]
    means = [record["reward/mean"] for record in blocks_of(_run(tmp_path, **options, rewards=rewards))]
    assert means[0] < -4 < -2 < fmean(means[-3:])


# --- odd completions ------------------------------------------------------------------------------------------------


def test_values_are_not_fitted_where_nothing_could_be_scored(tmp_path):
    faulty = {"name": "function", "path": "tests.train.faulty_rewards:nothing"}
    run, _ = start(tiny_recipe(tmp_path, **PPO, rewards=[faulty], train__blocks=1))
    assert [record["loss/value"] for record in steps_of(run)] == [0] * len(steps_of(run))
    assert blocks_of(run)[0]["value/return_mean"] is None
    assert all((tensor == 0).all() for tensor in _value_heads(run)[-1].values())


@pytest.mark.parametrize("action", ["token", "turn"])
def test_completions_of_several_turns_are_trained_on(tmp_path, action):
    completions = [
        Completion(
            str(p), (3, 4, 5, 6, 7, 2), "a" * n, "stop", trained=(True, True, False, True, True, True),
            turn=(0, 0, 0, 1, 1, 1),
        )
        for p in range(8) for n in (1, 2, 3, 4)
    ]  # fmt: skip
    advantage = {"name": "gae", "lambda_": 1.0, "action": action}
    run = _run(tmp_path, **_recorded(tmp_path, completions), algorithm={"preset": "ppo", "advantage": advantage})
    assert blocks_of(run)[0]["value/return_mean"] == blocks_of(run)[0]["reward/mean"]  # paid once, undiscounted
    assert all(math.isfinite(record["loss/value"]) for record in steps_of(run))
    assert any((tensor != 0).any() for tensor in _value_heads(run)[-1].values())
