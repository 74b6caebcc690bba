"""The algorithm is the preset with the recipe's replacements; parts that do not go together are refused."""

import pytest
import torch

from logitless.errors import ConfigurationError
from logitless.models.value_head import ValueHead, save_value_head
from logitless.objective.value import ValueLoss
from logitless.train.assembly.algorithm import algorithm_of, value_head_of
from tests.train.tiny import tiny_model, tiny_recipe

IN_REWARD = {"placement": "reward", "control": {"name": "fixed", "beta": 0.1}}


def test_the_kl_of_the_loss_is_the_recipes(tmp_path):
    def kl(**changes):
        return algorithm_of(tiny_recipe(tmp_path, **changes)).objective.kl

    assert kl().estimator == "k3"
    assert kl(kl__penalty={"estimator": "k2"}).estimator == "k2"
    assert kl(kl=IN_REWARD) is kl(kl=None) is None
    with pytest.raises(ConfigurationError, match="k1"):  # uncorrected
        kl(kl__penalty={"estimator": "k1"})
    assert kl(kl__penalty={"estimator": "k1", "ratio_corrected": "token"}).ratio_corrected == "token"


def test_the_length_of_dr_grpo_is_the_limit_of_the_rollouts(tmp_path):
    assert algorithm_of(tiny_recipe(tmp_path, algorithm={"preset": "dr_grpo"})).weighting.max_new_tokens == 6
    given = {"preset": "dr_grpo", "parameters": {"max_new_tokens": 100}}
    assert algorithm_of(tiny_recipe(tmp_path, algorithm=given)).weighting.max_new_tokens == 100


def test_parts_of_a_preset_are_replaced_by_name(tmp_path):
    parts = {
        "preset": "grpo",
        "surrogate": {"name": "clip", "ratio_min": 0.5, "ratio_max": 3.0},
        "advantage": {"name": "leave_one_out"},
        "weighting": {"name": "token_mean"},
    }
    found = algorithm_of(tiny_recipe(tmp_path, algorithm=parts))
    assert (found.objective.surrogate.ratio_min, found.objective.surrogate.ratio_max) == (0.5, 3.0)
    assert (found.advantage.name, found.weighting.name) == ("leave_one_out", "token_mean")


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"preset": "grpo", "advantage": {"name": "gae"}}, r"Set algorithm\.value_loss"),
        ({"preset": "grpo", "value_loss": {}}, r"given group_standardized.*name: gae"),
        ({"preset": "ppo", "ratio": {"name": "sequence"}}, r"'sequence'.*given gae.*name: token"),
        ({"preset": "gspo", "advantage": {"name": "reinforce_pp"}, "kl": IN_REWARD}, r"'sequence'.*given reinforce_pp"),
        ({"preset": "grpoo"}, "Did you mean 'grpo'"),
        ({"preset": "GRPO"}, "Did you mean 'grpo'"),
        ({"preset": "grpo", "parameters": {"epsilom": 1}}, "Did you mean 'epsilon'"),
        ({"preset": "grpo", "advantage": {"name": "gdpo"}, "kl": IN_REWARD}, r"Set kl\.placement: loss"),
    ],
)
def test_parts_that_do_not_go_together_are_refused_with_a_repair(tmp_path, algorithm, message):
    changes = {"kl": algorithm["kl"]} if "kl" in algorithm else {}
    parts = {name: part for name, part in algorithm.items() if name != "kl"}
    with pytest.raises(ConfigurationError, match=message):
        algorithm_of(tiny_recipe(tmp_path, algorithm=parts, **changes))


def test_the_value_loss_of_a_preset_is_kept_or_replaced(tmp_path):
    kept = algorithm_of(tiny_recipe(tmp_path, algorithm={"preset": "ppo"}))
    assert kept.value_loss == ValueLoss(coefficient=0.5, clip=0.2)
    value_loss = {"coefficient": 0.1, "clip": None}
    replaced = algorithm_of(tiny_recipe(tmp_path, algorithm={"preset": "ppo", "value_loss": value_loss}))
    assert replaced.value_loss == ValueLoss(coefficient=0.1, clip=None)


def test_a_value_head_is_made_for_a_value_loss_only_from_zeros_or_a_file(tmp_path):
    own = ValueHead(16)
    torch.nn.init.constant_(own.weight, 1.0)
    save_value_head(own, tmp_path / "own.safetensors")
    grpo, ppo = tiny_recipe(tmp_path), tiny_recipe(tmp_path, algorithm={"preset": "ppo"})
    named = tiny_recipe(tmp_path, algorithm={"preset": "ppo"}, value_head={"source": str(tmp_path / "own.safetensors")})
    model = tiny_model(grpo)
    assert value_head_of(grpo, algorithm_of(grpo), model) is None
    for recipe, expected in ((ppo, 0.0), (named, 1.0)):
        found = value_head_of(recipe, algorithm_of(recipe), model)
        assert found.weight.tolist() == [[expected] * 16]


@pytest.mark.parametrize(
    ("top_p", "correction", "said"),
    [(0.9, None, True), (0.9, {"max": 2.0, "filtered_sampling": "accept"}, False), (1.0, None, False)],
)
def test_sampling_from_another_distribution_is_said(tmp_path, caplog, top_p, correction, said):
    algorithm = {"preset": "grpo", "correction": correction}
    algorithm_of(tiny_recipe(tmp_path, rollout__sampling__top_p=top_p, algorithm=algorithm))
    assert ("to be on policy" in caplog.text) is said


def test_one_completion_is_enough_without_a_group_alone(tmp_path):
    one = {"rollout__completions_per_prompt": 1}
    assert algorithm_of(tiny_recipe(tmp_path, **one, algorithm={"preset": "reinforce_pp"})).advantage is not None
    with pytest.raises(ConfigurationError, match="at least two completions a prompt"):
        algorithm_of(tiny_recipe(tmp_path, **one))
