"""The load-balancing loss, by numbers worked by hand and by its laws."""

import pytest
import torch

from logitless.objective.load_balancing import load_balancing_loss


def test_the_loss_is_experts_times_the_product_of_means():
    """8 tokens, 2 experts each of 4: E * sum_e (c_e / 8) (p_e / 8) = 4 * (8*5 + 4*1 + 3*1.5 + 1*0.5) / 64."""
    chosen, probability = torch.tensor([8.0, 4.0, 3.0, 1.0]), torch.tensor([5.0, 1.0, 1.5, 0.5])
    loss = load_balancing_loss(chosen, probability, experts_per_token=2)
    assert float(loss) == pytest.approx(4 * 49 / 64)


def test_the_losses_of_parts_add_up_to_that_of_the_whole():
    chosen = torch.tensor([9.0, 2.0, 1.0], dtype=torch.float64)
    parts = torch.rand(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = load_balancing_loss(chosen, parts.sum(0), experts_per_token=3)
    added = sum(load_balancing_loss(chosen, part, experts_per_token=3) for part in parts)
    assert float(whole) == pytest.approx(float(added), rel=1e-14)


@pytest.mark.parametrize("experts_per_token", [1, 2])
def test_an_even_load_gives_the_experts_of_a_token(experts_per_token):
    chosen, probability = torch.full((4,), 10.0 * experts_per_token), torch.full((4,), 10.0)
    assert float(load_balancing_loss(chosen, probability, experts_per_token=experts_per_token)) == experts_per_token
