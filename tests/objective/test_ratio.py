"""The log ratio at each level: value by hand, gradient by hand."""

import pytest
import torch

from logitless.objective.ranges import Ranges
from logitless.objective.ratio import sequence_log_ratio, sequence_token_log_ratio, token_log_ratio

# Two sequences: A of tokens 0, 1, 2 (the last untrained), B of token 3.
LOGP = [-1.0, -2.0, -9.0, -0.5]
OLD = [-1.5, -1.0, -1.0, -0.25]
RANGES = Ranges(torch.tensor([0, 0, 0, 1]), 2, torch.tensor([True, True, False, True]))


def test_no_gradient_reaches_the_old_policy():
    old = torch.tensor([-1.0], requires_grad=True)
    logp = torch.tensor([-2.0], requires_grad=True)
    token_log_ratio(logp, old).sum().backward()
    assert old.grad is None
    assert logp.grad.item() == 1.0


@pytest.mark.parametrize(
    ("function", "values", "gradient_of_second"),
    [
        # -1 + 1.5 = 0.5; -2 + 1 = -1; -9 + 1 = -8; -0.5 + 0.25 = -0.25
        (None, [0.5, -1.0, -8.0, -0.25], [0.0, 1.0, 0.0, 0.0]),
        # (0.5 - 1) / 2 = -0.25 for all of A, the untrained token included; B: -0.25
        (sequence_log_ratio, [-0.25] * 4, [0.5, 0.5, 0.0, 0.0]),
        (sequence_token_log_ratio, [-0.25] * 4, [0.0, 1.0, 0.0, 0.0]),
    ],
    ids=["token", "sequence", "sequence_token"],
)
def test_log_ratios_and_the_gradient_of_the_second_by_hand(function, values, gradient_of_second):
    logp = torch.tensor(LOGP, dtype=torch.float64, requires_grad=True)
    log_ratio = token_log_ratio(logp, torch.tensor(OLD, dtype=torch.float64))
    log_ratio = log_ratio if function is None else function(log_ratio, RANGES)
    log_ratio[1].backward()
    assert log_ratio.tolist() == values
    assert logp.grad.tolist() == gradient_of_second
