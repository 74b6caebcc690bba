"""Checkpoints of several ranks, as one of them writes its part; whole runs are in ``test_rank_faults.py``."""

import json

import torch

from logitless.distributed.ranks import Ranks
from logitless.train.store import atomic
from logitless.train.store.shared_checkpoint import SharedSaver


class SecondOfTwo(Ranks):
    """Told by the first that a save begins, and that nothing failed."""

    rank, world = 1, 2

    def broadcast_object(self, value):
        return True, None

    def all_gather_object(self, value):
        return [None, value]


def test_a_rank_is_done_with_the_folder_when_its_part_is_there_for_the_first_may_move_it(tmp_path, monkeypatch):
    folder, flushed = tmp_path / ".saving-block-000001-step-000002", []

    def first_moves_what_is_complete(path):
        assert not (path / "part-1.json").exists()
        flushed.append(path)

    monkeypatch.setattr(atomic, "flush", first_moves_what_is_complete)
    folder.mkdir()
    saver = SharedSaver(tmp_path, keep=1, ranks=SecondOfTwo())
    saver.save(block=1, step=2, tensors={"a": torch.ones(2)}, state={})
    saver.wait()
    assert flushed == [folder]
    assert json.loads((folder / "part-1.json").read_bytes()) == {}  # the first writes what all ranks have
