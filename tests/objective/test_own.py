"""Surrogates and advantages of one's own: what is made of a path, and what is refused before anything is trained."""

import pytest
import torch

from logitless.errors import ConfigurationError, InputError
from logitless.objective.advantage import AdvantageInputs
from logitless.objective.objective import Objective
from logitless.objective.own import OwnAdvantage, OwnSurrogate, check_estimator, check_surrogate
from logitless.objective.presets import PRESETS, algorithm
from tests.objective.batches import batch_of, double

HEAD = """\
from dataclasses import dataclass
from typing import ClassVar
import torch
from logitless.objective.advantage import AdvantageOutput, Estimator, OnePerCompletion
from logitless.objective.surrogate import PolicyLoss, SurrogateTerms
"""
SURROGATE = """
@dataclass(frozen=True)
class Mine(PolicyLoss):
    scale: float = 1.0

    def __call__(self, inputs):
        loss = -self.scale * inputs.advantage * inputs.log_ratio.exp()
        return {result}
"""
ADVANTAGE = """
@dataclass(frozen=True, kw_only=True)
class Mine(Estimator):
    def level(self, *, kl_in_reward):
        return "{level}"

    def __call__(self, inputs, sum_over_ranks=None):
        of_token = inputs.completion_rewards().nan_to_num()[inputs.sequence]
        return {result}
"""


def path_of(folder, text: str) -> str:
    (folder / "mine.py").write_text(HEAD + text)
    return f"{folder}/mine.py:Mine"


def surrogate(folder, result="SurrogateTerms(loss)", **options):
    path = path_of(folder, SURROGATE.replace("{result}", result))
    return OwnSurrogate(factory=path, options=options).made()


def advantage(folder, result="AdvantageOutput(of_token)", level="sequence"):
    path = path_of(folder, ADVANTAGE.replace("{result}", result).replace("{level}", level))
    return OwnAdvantage(factory=path).made()


def test_a_surrogate_by_its_path_has_the_loss_and_the_gradient_that_it_says(tmp_path):
    logp = double(-1, -2).requires_grad_()
    batch = batch_of([0, 1], advantage=[1, -3], token_weight=[0.5, 0.25], logp_old=[-1, -2])
    output = Objective(surrogate=surrogate(tmp_path, scale=2.0))(logp, None, batch)
    output.loss.backward()
    # -2 A r = -2 and 6 at r = 1, weighed by 0.5 and 0.25; the gradient of r is r
    assert output.loss.item() == pytest.approx(-1 + 1.5)
    assert logp.grad.tolist() == pytest.approx([-1.0, 1.5])


@pytest.mark.parametrize(
    ("made", "result", "said"),
    [
        (surrogate, "loss", "SurrogateTerms from the surrogate 'own'.*given Tensor"),
        (surrogate, "SurrogateTerms(loss[1:])", r"loss \[N\] with N = 10.*given a tensor \[9\]"),
        (surrogate, "SurrogateTerms(loss.detach())", "differentiable in logp"),
        (surrogate, "SurrogateTerms(0 * loss)", "differentiable in logp.*no gradient for any token"),
        (surrogate, "SurrogateTerms(loss / 0)", "a finite loss for each token.*given 10 of 10"),
        (surrogate, "SurrogateTerms((inputs.log_ratio ** 2).sqrt())", "a finite gradient for each token"),
        (surrogate, "SurrogateTerms(loss + inputs.nothing)", "AttributeError.*nothing.*mine.py, line 13"),
        (advantage, "of_token", "AdvantageOutput.*given Tensor"),
        (
            advantage, "AdvantageOutput(inputs.rewards.nan_to_num())",
            r"each of 10 tokens from 'own'.*given a tensor \[4\]",
        ),
        (advantage, "AdvantageOutput(inputs.rewards[inputs.sequence])", "given 2 of 10 that are not finite"),
        (advantage, "AdvantageOutput(of_token + 1)", "advantage 0 for a completion without a reward"),
        (advantage, "AdvantageOutput(of_token * torch.arange(10))", "one advantage a completion, as its level"),
        (advantage, "AdvantageOutput(of_token + inputs.nothing)", "AttributeError.*mine.py, line 14"),
    ],
)  # fmt: skip
def test_what_is_not_one_finite_number_a_token_is_refused_by_its_path(tmp_path, made, result, said):
    with pytest.raises(ConfigurationError, match=said) as caught:
        made(tmp_path, result)
    assert "mine.py:Mine" in str(caught.value)


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ('reads = "tokens"', "`reads` to be one of any, token, none from .*mine.py:Mine; given 'tokens'"),
        ('level = "seq"', "`level` to be one of .*sequence.* from .*mine.py:Mine; given 'seq'"),
        ('reads = "none"', "logp_old.* from .*mine.py:Mine"),
    ],
)
def test_what_a_surrogate_states_of_itself_must_be_known_and_true(tmp_path, stated, said):
    text = SURROGATE.replace("{result}", "SurrogateTerms(loss)")
    text = text.replace("inputs.log_ratio.exp()", 'required(inputs.log_ratio, "logp_old").exp()')
    text = "from logitless.objective.inputs import required\n" + text.replace("scale:", f"{stated}\n    scale:")
    with pytest.raises(ConfigurationError, match=said):
        OwnSurrogate(factory=path_of(tmp_path, text)).made()


def test_an_option_of_another_type_is_named_beside_the_line_that_it_breaks(tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"mine.py, line 12. Correct that line, or its options .'scale': 'high'"
    ):
        surrogate(tmp_path, scale="high")


def test_another_shape_is_refused_at_every_call(tmp_path):
    made = surrogate(tmp_path, "SurrogateTerms(loss if len(loss) == 10 else loss[:1])")
    with pytest.raises(InputError, match=r"given a tensor \[1\]"):
        Objective(surrogate=made)(double(0, 0).requires_grad_(), None, batch_of(2))


def test_an_advantage_by_its_path_is_what_it_says(tmp_path):
    inputs = AdvantageInputs(torch.tensor([1.0, 3.0]), torch.tensor([5, 5]), torch.tensor([0, 1, 1]))
    assert advantage(tmp_path).checked(inputs).advantage.tolist() == [1, 3, 3]


def test_an_advantage_a_token_says_so(tmp_path):
    assert advantage(tmp_path, "AdvantageOutput(of_token * torch.arange(10))", level="token").name == "own"


def test_an_advantage_a_completion_is_one_number_for_each(tmp_path):
    text = """
@dataclass(frozen=True, kw_only=True)
class Mine(OnePerCompletion):
    def per_completion(self, inputs, sum_over_ranks):
        return inputs.rewards.nan_to_num()[inputs.sequence]
"""
    with pytest.raises(ConfigurationError, match=r"one advantage for each of 4 completions.*given a tensor \[10\]"):
        OwnAdvantage(factory=path_of(tmp_path, text)).made()


@pytest.mark.parametrize(("kind", "wanted"), [(OwnSurrogate, "a PolicyLoss"), (OwnAdvantage, "an Estimator")])
def test_what_is_no_part_of_an_algorithm_is_refused(kind, wanted):
    with pytest.raises(ConfigurationError, match=f"{wanted} from builtins:dict; given dict"):
        kind(factory="builtins:dict").made()


@pytest.mark.parametrize("name", PRESETS)
def test_every_part_of_the_library_passes_the_trial(name):
    preset = algorithm(name, {"beta": 0.1} if name == "dro" else {})
    check_surrogate(preset.objective.surrogate, name)
    if preset.advantage is not None:
        check_estimator(preset.advantage, name)
