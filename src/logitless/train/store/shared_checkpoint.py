"""Checkpoints of several ranks: each writes its own shards, and the first one writes the index.

The format is that of ``checkpoint.py``, so that a run resumes on any number of ranks. It is not that of
torch.distributed.checkpoint, whose metadata is a pickle and runs code when it is read.

    .saving-block-000003-step-000012/
        tensors-of-1-00001.safetensors   shards of rank 1
        part-1.json                      their entries of the index; rank 1 is done
"""

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logitless.distributed.ranks import Ranks
from logitless.distributed.sharding import is_sharded, is_spare_copy
from logitless.errors import CheckpointError
from logitless.train.store.atomic import cannot_write, write_atomically
from logitless.train.store.checkpoint import BackgroundSaver, create_partial, partial_of, write_pieces


class SharedSaver(BackgroundSaver):
    """``BackgroundSaver`` for several ranks; its methods are collectives, and of ``state`` the first rank's is stored.

    The folder appears when the last rank has written its part. In ``wait`` the ranks exchange errors: a full disk on
    one of them ends all of them.

    Args:
        root: the run's checkpoint folder, which all ranks see.
    """

    def __init__(self, root: Path, *, keep: int, ranks: Ranks) -> None:
        super().__init__(root, keep=keep)
        self.ranks = ranks
        self._wrote, self._given_up = threading.Event(), threading.Event()

    def _begins(self, final: Path) -> bool:
        """Let the first rank create the folder.

        Raises:
            CheckpointError: the folder cannot be made.
        """
        begins, failed = False, None
        if self.ranks.is_first and super()._begins(final):
            try:
                create_partial(final)
                begins = True
            except CheckpointError as error:
                failed = error.given
        begins, failed = self.ranks.broadcast_object((begins, failed))
        if failed is not None:
            raise cannot_write(final, failed, CheckpointError)
        self._wrote, self._given_up = threading.Event(), threading.Event()
        return begins

    def _writes(self, tensor: Tensor) -> bool:
        """Each shard is written once, and what all ranks have by the first."""
        return not is_spare_copy(tensor) if is_sharded(tensor) else self.ranks.is_first

    def _write(
        self, final: Path, tensors: Mapping[str, Tensor], stream: torch.cuda.Stream | None
    ) -> dict[str, Any] | None:
        partial = partial_of(final)
        with torch.cuda.stream(stream):
            index = write_pieces(partial, tensors, prefix=f"tensors-of-{self.ranks.rank}")
        part = partial / f"part-{self.ranks.rank}.json"
        whole_part = part.with_name(f".whole-{part.name}")
        write_atomically(whole_part, json.dumps(index).encode())
        whole_part.replace(part)  # from now on the first rank may rename the folder
        self._wrote.set()
        return self._index_of_all(partial) if self.ranks.is_first else None

    def _is_over(self) -> None:
        self._wrote.set()  # where this rank failed before: ``wait`` finds the error

    def wait(self) -> None:
        """Wait until the checkpoint is written by all ranks.

        Raises:
            CheckpointError: on every rank, if the save failed on one; earlier checkpoints are unchanged.
        """
        if self._thread is None:
            return
        self._wrote.wait()
        failed = self._failed()
        if failed is not None:
            self._given_up.set()
        self._thread.join()
        self._thread = None
        failed = failed or self._failed()
        if failed is not None:
            self._error = None
            if self.ranks.is_first:
                self._remove_partial()
            raise CheckpointError(
                needed="a checkpoint of all ranks",
                given=failed,
                remedy="Free disk space or choose another `output`, then continue with --resume from the last one.",
            )

    def _failed(self) -> str | None:
        """The error of the first rank that has one, in words; None if none has. A collective."""
        said = self.ranks.all_gather_object(None if self._error is None else str(self._error))
        return next((f"on rank {rank}: {text}" for rank, text in enumerate(said) if text is not None), None)

    def _index_of_all(self, partial: Path) -> dict[str, Any] | None:
        """Wait for the parts of all ranks, and merge them into the index; None if another rank failed."""
        paths = [partial / f"part-{rank}.json" for rank in range(self.ranks.world)]
        while not all(path.exists() for path in paths):
            if self._given_up.is_set():
                return None
            time.sleep(0.02)
        whole: dict[str, Any] = {}
        for path in paths:
            for name, entry in json.loads(path.read_bytes()).items():
                whole.setdefault(name, {**entry, "pieces": []})["pieces"] += entry["pieces"]
            path.unlink()
        return whole
