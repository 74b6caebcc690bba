"""Quick launches on a GPU: the numbers that Triton's own launches give."""

import pytest
import torch

triton = pytest.importorskip("triton")

from logitless.quick_launch import quick_launch  # noqa: E402
from tests.test_quick_launch import add  # noqa: E402

pytestmark = pytest.mark.gpu


def test_quick_launches_compute_what_triton_launches_compute():
    quick, plain = quick_launch(triton.jit(add)), triton.jit(add)
    room = torch.arange(4096, device="cuda", dtype=torch.float32)
    for turn in range(3):
        for offset in (0, 1, 4):
            for count in (1, 16, 100, 1024):
                for other in (None, room[8:]):
                    found, wanted = torch.zeros(2, 2048, device="cuda")
                    for kernel, target in ((quick, found), (plain, wanted)):
                        kernel[(1,)](
                            room[offset + 4 * turn :], other, target, 0.5, count, FLAG=False, BLOCK=1024, num_warps=4
                        )
                    assert torch.equal(found, wanted), (turn, offset, count)
    assert len(quick._by_kind) == 2 * 3 * 2  # aligned or not; 1, a multiple of 16 or neither; None or a tensor


def test_a_captured_graph_replays_quick_launches():
    kernel = quick_launch(triton.jit(add))
    x, y = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")
    arguments = {"FLAG": True, "BLOCK": 64, "num_warps": 1}
    for _ in range(2):
        kernel[(1,)](x, None, y, 0.0, 64, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel[(1,)](x, None, y, 0.0, 64, **arguments)
    x.fill_(4.0)
    graph.replay()
    assert torch.equal(y, torch.full_like(y, 5.0))
