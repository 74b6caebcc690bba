"""Two nodes, each a torchrun at a loopback address: the run of one node in every bit, also if one is lost.

On a CPU a node has two ranks, over gloo. On GPUs it has one, and NCCL, told that the nodes are two hosts, uses sockets.
"""

import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import pytest

from logitless.train.record.run_folder import RunFolder
from tests.train.test_data_parallel import ROOT, SHORT
from tests.train.test_rank_faults import ENVIRONMENT
from tests.train.test_sampling_ranks import assert_same

# In the middle of a block the ranks of one node lose their torchrun, and end with it.
PROGRAM = """
import os, signal, sys, time
from logitless.cli.main import main
from logitless.train.learn.learner import Learner

lost, plain = sys.argv.pop(1), Learner.step

def step(self):
    if os.environ["GROUP_RANK"] == lost and self.progress.step == 3:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
    return plain(self)

Learner.step = step
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""
SECONDS = 150
"""Ten times as long as the ranks of the other node wait at most before they say what is lost."""


class Kind(NamedTuple):
    """Of nodes."""

    device: str
    ranks: int

    def environment(self, node, number):
        """Of a node's torchrun."""
        if self.device == "cpu" or number == 1:
            return ENVIRONMENT
        sockets = {"NCCL_HOSTID": f"node{node}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        return ENVIRONMENT | sockets | {"CUDA_VISIBLE_DEVICES": str(node)}


@contextmanager
def _nodes(kind, folder, number, *, lost="none", resume=False):
    """The small quickstart on all ranks: the torchrun of each node, which writes to a file of its number."""
    (folder / "program.py").write_text(PROGRAM)
    settings = [*SHORT, "checkpoint.every_blocks=1", "parallel.replicate=2", f"model.device={kind.device}", "name=run"]
    program = [str(folder / "program.py"), lost, "train", "recipes/quickstart.yaml", *["--resume"] * resume]
    program += [argument for each in (*settings, f"output={folder}") for argument in ("--set", each)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    with ExitStack() as stack:
        started = []
        for node in range(number):
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(number)]
            launcher += ["--nproc-per-node", str(kind.ranks // number), "--local-addr", f"127.0.0.{node + 1}"]
            launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", place, "--rdzv-conf", f"is_host={node == 0:d}"]
            output, environment = stack.enter_context((folder / str(node)).open("w")), kind.environment(node, number)
            each = subprocess.Popen([*launcher, *program], cwd=ROOT, env=environment, stdout=output, stderr=output)
            started.append(each)
            stack.callback(each.wait)
            stack.callback(each.kill)  # its ranks end with it
        yield started


def _said(folder):
    return "\n".join((folder / name).read_text() for name in "01" if (folder / name).exists())


def _finished(kind, folder, number, **beginning):
    """The folder of a run to its end."""
    with _nodes(kind, folder, number, **beginning) as nodes:
        assert [each.wait() for each in nodes] == [0] * number, _said(folder)
    return RunFolder(folder / "run")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(Kind("cpu", 4), marks=pytest.mark.slow, id="cpu"),
        pytest.param(Kind("cuda", 2), marks=pytest.mark.multi_gpu, id="cuda"),
    ],
)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def of_one_node(kind, tmp_path_factory):
    """The folder of the run of one node."""
    return _finished(kind, tmp_path_factory.mktemp("one"), 1)


@pytest.mark.parametrize(("lost", "says"), [(0, "holds the ranks' store"), (1, "says nothing: lost, or hung")])
def test_a_lost_node_ends_the_other_with_its_name_and_the_run_goes_on_as_that_of_one(
    kind, of_one_node, tmp_path, lost, says
):
    with _nodes(kind, tmp_path, 2, lost=str(lost)) as nodes:
        assert nodes[lost].wait() == -signal.SIGKILL, _said(tmp_path)
        assert nodes[1 - lost].wait(SECONDS) == 1
    name = f"node {socket.gethostname()} (ranks {2 * lost}, {2 * lost + 1})"
    # A process that waits in NCCL is ended by it, before it can say without whom.
    said = f"without {name}, which {says}" if kind.device == "cpu" else "NCCL error: remote process exited"
    assert said in (tmp_path / str(1 - lost)).read_text()
    assert RunFolder(tmp_path / "run").read_metrics()[-1]["step"] == 3
    # on what is left, or on two nodes again
    assert_same(of_one_node, _finished(kind, tmp_path, 1 + lost, resume=True))
