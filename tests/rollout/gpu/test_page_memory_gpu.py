"""Memory at fixed addresses."""

import pytest
import torch

from logitless.rollout.gpu.page_memory import PageMemory

pytestmark = pytest.mark.gpu


def taken_by(call):
    """Bytes of the device that a call leaves in use; the least of several calls, because others use the device too."""
    found = []
    for _ in range(5):
        before = torch.cuda.mem_get_info()[0]
        call()
        found.append(before - torch.cuda.mem_get_info()[0])
    return min(found)


def test_addresses_stay_while_memory_comes_and_goes():
    memory = PageMemory(3, torch.device("cuda", 0))
    small = memory.open(1000)
    addresses = [part.data_ptr() for part in small]
    large = memory.open(2**28)
    assert [part.data_ptr() for part in large] == addresses
    large.fill_(7)
    assert int(large[2, -1]) == 7
    memory.close()

    def opened_and_closed():
        memory.open(2**28)
        memory.close()

    assert taken_by(opened_and_closed) < 2**27
    again = memory.open(2**20)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=side):
        again.add_(1)
    memory.close()
    third = memory.open(2**20).zero_()
    graph.replay()
    assert int(third.sum()) == 3 * 2**20
    memory.close()


def test_what_does_not_fit_is_out_of_memory_and_leaves_nothing_behind():
    memory = PageMemory(2, torch.device("cuda", 0))
    _, total = torch.cuda.mem_get_info()

    def too_much():
        with pytest.raises(torch.OutOfMemoryError):
            memory.open(total // 2)

    assert taken_by(too_much) < 2**27
    memory.open(2**20)
    memory.close()
