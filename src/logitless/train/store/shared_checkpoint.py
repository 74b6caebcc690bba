"""Checkpoints of several ranks: each writes its own shards, and the first one writes the index.

The format is that of ``checkpoint.py``, so that a run resumes on any number of ranks. It is not that of
torch.distributed.checkpoint, whose metadata is a pickle and runs code when it is read.

    .saving-block-000003-step-000012/
        tensors-of-1-00001.safetensors   shards of rank 1
        part-1.json                      their entries of the index; rank 1 is done
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logitless.distributed.ranks import Ranks
from logitless.distributed.sharding import is_sharded, is_spare_copy
from logitless.errors import CheckpointError
from logitless.train.store.atomic import cannot_write, write_atomically
from logitless.train.store.checkpoint import (
    create_partial,
    folder_name,
    nothing,
    put_in_place,
    reading_stream,
    write_pieces,
)


class SharedSaver:
    """``BackgroundSaver`` for several ranks; its methods are collectives.

    The folder appears when the last rank has written its part. In ``wait`` the ranks exchange errors: a full disk on
    one of them ends all of them.

    Args:
        root: the run's checkpoint folder, which all ranks see.
        keep: checkpoints left after each save.
        ranks: of the run.
    """

    def __init__(self, root: Path, *, keep: int, ranks: Ranks) -> None:
        self.root, self.keep, self.ranks = root, keep, ranks
        self._thread: threading.Thread | None = None
        self._wrote, self._given_up = threading.Event(), threading.Event()
        self._error: Exception | None = None

    def save(
        self,
        *,
        block: int,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        best: str | None = None,
        settle: Callable[[], None] = nothing,
    ) -> None:
        """Begin to write; of ``state`` the first rank's is stored.

        Args:
            block, step, tensors, state, best, settle: of ``BackgroundSaver.save``.

        Raises:
            CheckpointError: the save before this one failed on some rank, or the folder cannot be made.
        """
        self.wait()
        final, begin, failed = self.root / folder_name(block, step), False, None
        if self.ranks.is_first and not final.exists():  # else saved already, or by an earlier start of the same run
            try:
                create_partial(final)
                begin = True
            except CheckpointError as error:
                failed = error.given
        begin, failed = self.ranks.broadcast_object((begin, failed))
        if failed is not None:
            raise cannot_write(final, failed, CheckpointError)
        if not begin:
            return
        mine = {name: tensor for name, tensor in tensors.items() if self._writes(tensor)}
        content, stream = json.dumps(state).encode(), reading_stream(mine)
        self._wrote, self._given_up = threading.Event(), threading.Event()

        def write() -> None:
            partial = final.with_name(f".saving-{final.name}")
            try:
                with torch.cuda.stream(stream):
                    index = write_pieces(partial, mine, prefix=f"tensors-of-{self.ranks.rank}")
                part = partial / f"part-{self.ranks.rank}.json"
                whole_part = part.with_name(f".whole-{part.name}")
                write_atomically(whole_part, json.dumps(index).encode())
                whole_part.replace(part)  # from now on the first rank may rename the folder
                self._wrote.set()
                if self.ranks.is_first and (whole := self._index_of_all(partial)) is not None:
                    settle()
                    put_in_place(partial, final, whole, content, self.keep, best)
            except OSError as error:
                self._error = cannot_write(final, error, CheckpointError)
            except Exception as error:
                self._error = error
            finally:
                self._wrote.set()

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

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
                for partial in self.root.glob(".saving-*"):
                    shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                needed="a checkpoint of all ranks",
                given=failed,
                remedy="Free disk space or choose another `output`, then continue with --resume from the last one.",
            )

    def _failed(self) -> str | None:
        """The error of the first rank that has one, in words; None if none has. A collective."""
        said = self.ranks.all_gather_object(None if self._error is None else str(self._error))
        return next((f"on rank {rank}: {text}" for rank, text in enumerate(said) if text is not None), None)

    def _writes(self, tensor: Tensor) -> bool:
        """Whether this rank writes a tensor: each shard is written once, and what all ranks have by the first."""
        return not is_spare_copy(tensor) if is_sharded(tensor) else self.ranks.is_first

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
