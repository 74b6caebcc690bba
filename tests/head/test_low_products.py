"""Both of LoRA's products from one pass over kept exponentials, against plain ones."""

import pytest
import torch

from logitless.head.kernels import launch
from logitless.head.kernels.variants import variant
from tests.head.interpreter import interpreted

pytestmark = pytest.mark.skipif(
    not (interpreted() or torch.cuda.is_available()), reason="needs Triton's interpreter or a GPU"
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("slots", "vocabulary", "taken"), [(70, 104, 70), (70, 104, 33), (70, 104, 0), (9, 17, 3)])
def test_one_pass_gives_both_products_of_the_taken_rows_and_zeros_for_the_others(dtype, slots, vocabulary, taken):
    device = "cpu" if interpreted() else "cuda"
    if device == "cuda":
        slots, vocabulary, taken = (70 * n for n in (slots, vocabulary, taken))
    g = torch.Generator(device).manual_seed(1)
    gpu = variant(torch.zeros(slots, 64, dtype=dtype, device=device))
    k = launch.kept_rows(slots, vocabulary, gpu, torch.device(device))
    k.normal_(generator=g)
    k[taken:] = torch.nan
    following = -(-max(taken, 1) // (2 * gpu.weight.depth)) * 2 * gpu.weight.depth
    k[taken:following] = 0  # as the rows after the live ones are left
    k = k[:, :vocabulary]
    narrow = torch.randn(vocabulary, 16, device=device, generator=g).to(dtype)
    low = torch.randn(slots, 32, device=device, generator=g).to(gpu.kept)
    low[taken:] = 0
    slot = torch.arange(slots, dtype=torch.int32, device=device)
    chosen = launch.Compaction(slot, torch.tensor([taken], dtype=torch.int32, device=device))
    found = launch.low_products(k, narrow, low, chosen, gpu)
    live = k[:taken].double()
    wanted = (torch.zeros(slots, 16, dtype=torch.float64, device=device), live.T @ low[:taken].double())
    wanted[0][:taken] = live @ narrow.double()
    for ours, exact in zip(found, wanted, strict=True):
        assert ours.dtype == torch.float32
        # Sums of as many products as there are columns or rows; tf32 on GPUs, where operands are float32.
        bound = (2**-9 if device == "cuda" and dtype == torch.float32 else 1e-5) * max(slots, vocabulary) ** 0.5
        assert (ours - exact).abs().max() <= bound * 4
    again = launch.low_products(k, narrow, low, chosen, gpu)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert torch.equal(found[0][taken:], torch.zeros_like(found[0][taken:]))
