"""The likelihood of observed tokens, against prime-rl's component of the loss."""

import pytest
import torch

from logitless.errors import ConfigurationError
from logitless.objective.observations import Observations, observation_diagnostics
from logitless.objective.presets import algorithm
from tests.objective.batches import double


def test_micro_batches_add_up_to_the_component_of_prime_rl():
    logp = double(-0.5, -2.0, -1.0, -4.0, -0.25).requires_grad_()
    parts = [Observations(0.1)(logp[[0, 2]], 1 / 3), Observations(0.1)(logp[[3]], 1 / 3)]
    loss = torch.stack([part.loss for part in parts]).sum()
    # compute_loss of its commit 559b447, with ce_weights 0.1 0 0.1 0.1 0 and ce_scale 3
    assert loss.item() == pytest.approx(0.18333333333333335, rel=1e-15)
    expected = double(-0.03333333333333333, 0, -0.03333333333333333, -0.03333333333333333, 0)
    torch.testing.assert_close(torch.autograd.grad(loss, logp)[0], expected, rtol=1e-15, atol=0)
    assert observation_diagnostics(parts)["loss/observations"].item() == pytest.approx(5.5 / 3)


def test_a_step_without_observed_tokens_has_no_loss_of_them():
    found = Observations()(double(), 1.0)
    assert (found.loss.item(), observation_diagnostics([found])["loss/observations"].item()) == (0.0, 0.0)


def test_zero_advantage_sequences_are_trained_on_for_what_they_observed():
    assert not algorithm("echo").silent_without_advantage


def test_a_coefficient_that_is_not_positive_is_refused():
    with pytest.raises(ConfigurationError, match="positive coefficient"):
        Observations(0.0)
