"""Each loss is the formula that Tinker publishes, in float64, with its gradient."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from logitless.errors import InputError
from logitless.tinker.losses import DEFAULTS, INPUTS, checked_config, token_losses

LENGTHS = [3, 5, 1, 4]
N = sum(LENGTHS)


def case(seed=0):
    rng = np.random.default_rng(seed)
    logp, logq = -rng.exponential(1.0, N), -rng.exponential(1.0, N)
    inputs = {"weights": rng.normal(size=N), "logprobs": logq, "advantages": rng.normal(size=N)}
    inputs["advantages"][[0, 4]] = 0.0
    inputs["sequence_ratio_mask"] = (rng.random(N) < 0.7).astype(float)
    return logp, inputs


def published(name, config, logp, inputs):
    """The sum as the pages of the service write it, and its gradient by logp, by hand."""
    if name == "cross_entropy":
        return -(logp * inputs["weights"]).sum(), -inputs["weights"]
    q, a = inputs["logprobs"], inputs["advantages"]
    ratio = np.exp(logp - q)
    if name == "importance_sampling":
        return -(ratio * a).sum(), -ratio * a
    if name == "dro":
        beta = config["beta"]
        return -(logp * a - 0.5 * beta * (logp - q) ** 2).sum(), -(a - beta * (logp - q))
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    if name == "cispo":
        return -(np.clip(ratio, low, high) * logp * a).sum(), -np.clip(ratio, low, high) * a
    if name == "gspo":
        starts, mask = np.cumsum([0, *LENGTHS]), inputs["sequence_ratio_mask"] != 0
        for start, stop in pairwise(starts):
            own = (logp - q)[start:stop][mask[start:stop]]
            ratio[start:stop] = np.exp(own.mean() if len(own) else 0.0)
    clipped = np.clip(ratio, low, high) * a
    kept = (ratio * a <= clipped) & (a != 0)
    return -np.minimum(ratio * a, clipped).sum(), np.where(kept, -ratio * a, 0.0)


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("bounds", [{}, {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}])
def test_a_loss_and_its_gradient_are_the_published_formula(name, bounds):
    config = checked_config(name, {key: value for key, value in bounds.items() if key in DEFAULTS[name]})
    for seed in range(3):
        logp, inputs = case(seed)
        given = torch.tensor(logp, requires_grad=True)
        tensors = {key: torch.tensor(inputs[key]) for key in INPUTS[name]}
        loss = token_losses(name, config, given, tensors, LENGTHS).sum()
        loss.backward()
        expected, gradient = published(name, config, logp, inputs)
        # At most five roundings a token and a sum of 13: far below 100 eps of the largest term.
        largest = max(1.0, np.abs(gradient).max() * np.abs(logp).max())
        assert abs(loss.item() - expected) <= 100 * np.finfo(float).eps * largest * N
        assert np.abs(given.grad.numpy() - gradient).max() <= 100 * np.finfo(float).eps * largest


def test_prompt_tokens_whose_ratio_would_overflow_change_nothing():
    logp = torch.tensor([-900.0, -1.0], requires_grad=True)
    inputs = {"logprobs": torch.tensor([-2000.0, -1.0]), "advantages": torch.tensor([0.0, 1.0])}
    for name in ("importance_sampling", "ppo", "cispo"):
        (gradient,) = torch.autograd.grad(token_losses(name, DEFAULTS[name], logp, inputs, [2]).sum(), logp)
        assert gradient.tolist() == [0.0, -1.0]


def test_what_a_loss_does_not_have_is_refused():
    with pytest.raises(InputError, match="forward_backward_custom"):
        checked_config("stable_reinforce", {})
    with pytest.raises(InputError, match="nothing in loss_fn_config of cross_entropy"):
        checked_config("cross_entropy", {"clip_low_threshold": 0.8})
    with pytest.raises(InputError, match="beta: 'large'"):
        checked_config("dro", {"beta": "large"})
    for wrong in ({"clip_low_threshold": np.nan}, {"clip_high_threshold": 0.7}, {"clip_low_threshold": 1.3}):
        with pytest.raises(InputError, match=r"numbers .* low <= high"):
            checked_config("ppo", wrong)
