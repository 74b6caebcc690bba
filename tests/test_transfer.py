"""Tensors on their way to a GPU, on a machine without one, whose page-locked memory keeps strides as torch does."""

import pytest
import torch
from torch import Tensor

from logitless.transfer import sent
from logitless.types import TokenBatch


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What was copied to page-locked memory, and then to the GPU without waiting."""
    copies: list[Tensor] = []

    def pin_memory(tensor: Tensor) -> Tensor:
        copies.append(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype))  # as torch does
        return copies[-1].copy_(tensor)

    def to(tensor: Tensor, device: object, non_blocking: bool = False) -> Tensor:
        assert torch.device(str(device)).type == "cuda"
        assert non_blocking
        assert any(tensor is each for each in copies)
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(Tensor, "to", to)
    return copies


@pytest.mark.parametrize(
    "numbers",
    [
        torch.arange(6),
        torch.arange(6)[1::2],
        torch.arange(6.0).view(2, 3).T,
        torch.tensor(0.5).expand(4),
        torch.arange(2).expand(3, 2),
        torch.zeros(0, dtype=torch.long),
        torch.tensor([True, False]),
    ],
    ids=["plain", "every second", "transposed", "one for all", "a row for all", "none", "booleans"],
)
def test_numbers_arrive_unchanged_for_any_strides(numbers: Tensor, pinned: list[Tensor]) -> None:
    found = sent(numbers, "cuda")
    assert found.dtype == numbers.dtype
    assert found.tolist() == numbers.tolist()
    assert len(pinned) == 1


def test_page_locked_memory_is_taken_for_the_numbers_alone(pinned: list[Tensor]) -> None:
    sent(torch.zeros(1000, 3)[:, 0], "cuda:0")
    assert pinned[0].untyped_storage().nbytes() == 4 * 1000


def test_an_advantage_that_is_one_number_for_all_tokens_goes_to_a_gpu(pinned: list[Tensor]) -> None:
    ones = torch.ones(()).expand(3)
    tokens = TokenBatch(torch.tensor([0, 0, 1]), num_sequences=2, advantage=ones, token_weight=ones)
    assert tokens.to("cuda").advantage.tolist() == [1.0, 1.0, 1.0]
