"""The log ratio at each level: value by hand, gradient by hand."""

import torch

from logitless.objective.ranges import Ranges
from logitless.objective.ratio import sequence_log_ratio, sequence_token_log_ratio, token_log_ratio

# Two sequences: A of tokens 0, 1, 2 (the last untrained), B of token 3.
LOGP = [-1.0, -2.0, -9.0, -0.5]
OLD = [-1.5, -1.0, -1.0, -0.25]
RANGES = Ranges(torch.tensor([0, 0, 0, 1]), 2, torch.tensor([True, True, False, True]))


def gradient_of_second(function):
    """d (log ratio of token 1) / d logp."""
    logp = torch.tensor(LOGP, dtype=torch.float64, requires_grad=True)
    log_ratio = function(token_log_ratio(logp, torch.tensor(OLD, dtype=torch.float64)))
    log_ratio[1].backward()
    return log_ratio.tolist(), logp.grad.tolist()


def test_token_log_ratio_is_the_difference_with_gradient_one():
    # -1 + 1.5 = 0.5; -2 + 1 = -1; -9 + 1 = -8; -0.5 + 0.25 = -0.25
    values, gradient = gradient_of_second(lambda log_ratio: log_ratio)
    assert values == [0.5, -1.0, -8.0, -0.25]
    assert gradient == [0.0, 1.0, 0.0, 0.0]


def test_no_gradient_reaches_the_old_policy():
    old = torch.tensor([-1.0], requires_grad=True)
    logp = torch.tensor([-2.0], requires_grad=True)
    token_log_ratio(logp, old).sum().backward()
    assert old.grad is None
    assert logp.grad.item() == 1.0


def test_sequence_log_ratio_is_the_mean_over_trained_tokens_with_gradient_through_all_of_them():
    # (0.5 - 1) / 2 = -0.25 for all of A, the untrained token included; B: -0.25
    values, gradient = gradient_of_second(lambda log_ratio: sequence_log_ratio(log_ratio, RANGES))
    assert values == [-0.25, -0.25, -0.25, -0.25]
    assert gradient == [0.5, 0.5, 0.0, 0.0]


def test_sequence_token_log_ratio_has_the_value_of_the_sequence_and_the_gradient_of_the_token():
    values, gradient = gradient_of_second(lambda log_ratio: sequence_token_log_ratio(log_ratio, RANGES))
    assert values == [-0.25, -0.25, -0.25, -0.25]
    assert gradient == [0.0, 1.0, 0.0, 0.0]
