"""What ranks tell each other: sums, decisions, objects and gradients, and that all of them end when one fails."""

import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from logitless.distributed import Ranks, ranks_of_environment
from logitless.distributed import ranks as ranks_module
from logitless.distributed.arrangement import Arrangement
from logitless.errors import ConfigurationError, LostRankError, TrainingError
from tests import warm
from tests.ranks import DEVICES, run_on_ranks


def all_of_them():
    return Ranks(data=dist.group.WORLD)


def test_one_rank_alone_needs_no_process_group_and_changes_nothing():
    alone, tensor = Ranks.alone(), torch.tensor([1.0])
    assert not dist.is_initialized()
    assert (alone.rank, alone.world, alone.is_first) == (0, 1, True)
    assert alone.sum(tensor) is alone.gather(tensor) is tensor
    assert alone.max(2) == 2
    assert alone.all_gather_object({"a": (1,)}) == [{"a": (1,)}]
    assert alone.broadcast_object("x") == "x"
    alone.barrier()
    weight = nn.Parameter(tensor)
    weight.grad = given = torch.tensor([3.0])
    alone.sum_gradients([weight])
    assert weight.grad is given


def what_a_rank_sees(rank):
    us = all_of_them()
    us.barrier()
    weight = torch.tensor([rank + 0.5])
    us.broadcast([weight])
    return {
        "who": (us.rank, us.world, us.is_first),
        "sum": us.sum(torch.tensor([float(rank), 1.0])).tolist(),
        "rows": us.gather(torch.full((rank + 1,), rank)).tolist(),
        "max": us.max(-rank),
        "any": (us.any(rank == 1), us.any(False)),
        "objects": us.all_gather_object({"rank": rank, "π": [None, float("nan"), 0.1]}),
        "first": us.broadcast_object(f"of {rank}"),
        "copied": weight.tolist(),
        "bytes": us.all_gather_bytes(bytes(range(2 * rank))),
        "shared": us.all_gather_object([f"{place} by {rank}" for place in us.shared(3, range(us.world))]),
    }


def test_every_rank_sees_the_same_sums_rows_decisions_and_objects():
    found = run_on_ranks(2, what_a_rank_sees)
    assert [each.pop("who") for each in found] == [(0, 2, True), (1, 2, False)]
    assert repr(found[0]) == repr(found[1])
    nan = float("nan")
    assert repr(found[0]) == repr(
        {
            "sum": [1.0, 2.0],
            "rows": [0, 1, 1],
            "max": 0,
            "any": (True, False),
            "objects": [{"rank": r, "π": [None, nan, 0.1]} for r in range(2)],
            "first": "of 0",
            "copied": [0.5],
            "bytes": [b"", b"\x00\x01"],
            "shared": [["0 by 0", "2 by 0"], ["1 by 1"]],
        }
    )


def an_object_that_is_not_json(rank):
    with pytest.raises(TypeError):
        all_of_them().all_gather_object(object())


def test_what_json_cannot_hold_is_refused_rather_than_pickled():
    run_on_ranks(2, an_object_that_is_not_json)


COMPLETE = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def test_without_torchrun_a_process_is_alone():
    with ranks_of_environment("cpu", {}) as found:
        assert found == Ranks.alone()
    with ranks_of_environment("cpu", COMPLETE | {"WORLD_SIZE": "1"}) as found:
        assert found == Ranks.alone()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "2"),
        ("RANK", ""),
        ("WORLD_SIZE", "two"),
        ("LOCAL_RANK", "-1"),
        ("MASTER_ADDR", ""),
        ("MASTER_PORT", ""),
    ],
)
def test_an_environment_that_torchrun_did_not_make_is_refused(name, value):
    refused = pytest.raises(ConfigurationError, match="torchrun --nproc-per-node")
    with refused, ranks_of_environment("cpu", COMPLETE | {name: value}):
        raise AssertionError("connected")


def wait_for_a_rank_that_left(rank):
    us = all_of_them()
    if rank == 1:
        return None
    try:
        us.barrier()
    except TrainingError as error:
        return str(error)


def test_a_rank_that_waits_for_one_that_is_gone_says_so():
    message = run_on_ranks(2, wait_for_a_rank_that_left)[0]
    assert "needed all 2 ranks" in message
    assert "on rank 0" in message


def patience_of_groups(rank):
    """Seconds that each group of an arrangement waits: of other sequences, of one sequence, of a mesh."""
    waits = timedelta(seconds=77)
    us = Ranks(data=dist.group.WORLD, timeout=waits)
    sequences = us.arranged(Arrangement(1, 1, 2))
    copies = Arrangement(2, 1, 1).mesh("cpu", waits)
    groups = [sequences.data, sequences.sequence, *copies.get_all_groups()]
    us.barrier()  # or a rank that has its groups hangs up on one that is still being connected
    return [each._get_backend(torch.device("cpu")).options._timeout.total_seconds() for each in groups]


def test_every_group_waits_as_long_as_all_of_them():
    assert run_on_ranks(2, patience_of_groups) == [[77, 77, 77, 77]] * 2


def sum_over_copies(rank, device):
    """The sum of the ranks' numbers over the group of copies of the same shard."""
    mesh = Arrangement(2, 1, 1).mesh(device)
    number = torch.tensor([float(rank + 1)], device=device)
    dist.all_reduce(number, group=mesh.get_group("replicate"))
    return mesh.mesh_dim_names, mesh.mesh.tolist(), number


@pytest.mark.parametrize("device", DEVICES)
def test_a_process_that_had_another_group_of_all_ranks_makes_a_mesh_of_copies(device):
    for _ in range(2):  # torch's split of a group that is not the first of its process ends the process
        for names, ranks_of_mesh, number in run_on_ranks(2, sum_over_copies, device, device=device):
            assert (names, ranks_of_mesh) == (("replicate", "weights"), [[0], [1]])
            assert number.item() == 3


def nodes_of(rank):
    """The nodes as torchrun numbers them, where the first has the store's address; and without torchrun."""
    us = all_of_them()
    places = [{"GROUP_RANK": str(rank // 2), "MASTER_ADDR": ["127.0.0.1", "192.0.2.1"][rank // 2]}, {}]
    return [[(node.ranks, node.has_store) for node in us.nodes(place)] for place in places]


def test_a_node_is_what_torchrun_numbers_and_else_a_host():
    for found in run_on_ranks(3, nodes_of):
        assert found == [[((0, 1), True), ((2,), False)], [((0, 1, 2), False)]]


class Waiting(Ranks):
    """The first of two ranks, whose collective on a GPU never ends; NCCL's aborts are what it does ``ends`` for."""

    world, rank = 2, 0
    ends = staticmethod(lambda: None)

    @property
    def _everyone(self):
        return SimpleNamespace(_get_backend=lambda _: SimpleNamespace(abort=self.ends))


@pytest.fixture
def clock(monkeypatch):
    """Of ``wait_for``, from 0; each look at the GPU takes ten seconds."""
    now = SimpleNamespace(seconds=0.0)

    def sleep(_):
        now.seconds += 10

    monkeypatch.setattr(ranks_module, "time", SimpleNamespace(monotonic=lambda: now.seconds, sleep=sleep))
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, query=lambda: False))
    return now


def test_a_collective_is_ended_well_before_nccl_s_watchdog_finds_it_late(clock, monkeypatch):
    aborted = []
    monkeypatch.setattr(Waiting, "ends", staticmethod(lambda: aborted.append(clock.seconds)))
    with pytest.raises(LostRankError, match="all 2 ranks in a collective of NCCL"):
        Waiting(timeout=timedelta(seconds=1000)).wait_for(torch.device("cuda"))
    assert aborted == [510.0]


@pytest.mark.usefixtures("clock")
def test_a_lost_rank_is_told_also_where_nccl_s_abort_does_not_return_or_fails(monkeypatch):
    monkeypatch.setattr(ranks_module, "ABORT_SECONDS", 0.05)
    stuck, returned = ranks_module.threading.Event(), []

    def fails():
        raise dist.DistBackendError("NCCL error")

    for end in (lambda: returned.append(stuck.wait(60)), fails):
        monkeypatch.setattr(Waiting, "ends", staticmethod(end))
        with pytest.raises(LostRankError):
            Waiting(timeout=timedelta(seconds=1000)).wait_for(torch.device("cuda"))
    assert not returned
    stuck.set()


SIGNALLED = """
import os, sys
from torch.distributed.distributed_c10d import _get_default_store
from logitless.distributed.ranks import ranks_of_environment

with ranks_of_environment("cpu") as ranks:
    below = _get_default_store()._underlying_non_prefix_store
    print("found", below.check(["exception_dump"]))
    ranks.barrier()
    below.set("exception_dump", b"0")
    ranks.barrier()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(1)
"""


def test_ranks_that_are_started_again_do_not_find_that_nccl_s_watchdog_ended_those_before(tmp_path):
    (tmp_path / "program.py").write_text(SIGNALLED)
    done = warm.run("-m", "tests.torchrun", "1", str(tmp_path / "program.py"), environment=os.environ)
    assert done.returncode == 0, done.stderr
    assert "found True" not in done.stdout, done.stdout


STUCK = """
import atexit, os, time
from unittest import mock
from logitless.distributed import ranks

ranks.ABORT_SECONDS = 0.2
begin = time.monotonic()
with mock.patch("torch.distributed.distributed_c10d._abort_process_group", lambda: time.sleep(30)):
    try:
        with ranks.ranks_of_environment("cpu") as us:
            us.barrier()
            begin = time.monotonic()
            raise RuntimeError("no more room")
    except RuntimeError as error:
        when = "early" if time.monotonic() - begin < 20 else "late"
        os.write(1, f"{error} {when}\\n".encode())  # at once: both ranks write into one pipe
atexit._run_exitfuncs()
print("waits")
"""


def test_a_rank_that_failed_says_why_and_ends_also_where_nccl_does_not(tmp_path):
    (tmp_path / "program.py").write_text(STUCK)
    done = warm.run("-m", "tests.torchrun", "0", str(tmp_path / "program.py"), environment=os.environ)
    assert done.returncode == 1, done.stderr
    assert "no more room early" in done.stdout, done.stdout
    assert "waits" not in done.stdout
