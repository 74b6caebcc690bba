"""Checkpoints of several ranks: each writes its own shards, and the first makes one folder of them.

The format is that of ``checkpoint.py``: safetensors and JSON, so that a run goes on with any number of ranks, and one
process reads what several wrote. It is not that of torch.distributed.checkpoint, whose metadata is a pickle, which runs
code when it is read.

    .saving-block-000003-step-000012/
        tensors-of-1-00001.safetensors   shards of rank 1
        part-1.json                      what the index will say of them: rank 1 is done
"""

import json
import shutil
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
from logitless.train.store.atomic import write_atomically
from logitless.train.store.checkpoint import (
    begun,
    folder_name,
    no_room,
    put_in_place,
    reading_stream,
    write_pieces,
)


class SharedSaver:
    """``BackgroundSaver`` for several ranks, which call each method together.

    The folder appears as soon as the last rank has written its part. ``wait`` is where ranks tell each other how it
    went: a full disk on one of them ends all of them.

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
    ) -> None:
        """Begin to write; the state, of which the first rank's counts, is taken now.

        Args:
            block, step, tensors, state, best: of ``BackgroundSaver.save``.

        Raises:
            CheckpointError: the save before this one failed on some rank, or the folder cannot be made.
        """
        self.wait()
        final, begin, failed = self.root / folder_name(block, step), False, None
        if self.ranks.is_first and not final.exists():  # else the same moment of a deterministic run
            try:
                begun(final)
                begin = True
            except CheckpointError as error:
                failed = error.given
        begin, failed = self.ranks.broadcast_object((begin, failed))
        if failed is not None:
            raise no_room(final, failed)
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
                whole_part.replace(part)  # from here on the first may move the folder
                self._wrote.set()
                if self.ranks.is_first and (whole := self._everyones(partial)) is not None:
                    put_in_place(partial, final, whole, content, self.keep, best)
            except OSError as error:
                self._error = no_room(final, error)
            except Exception as error:
                self._error = error
            finally:
                self._wrote.set()

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when the checkpoint is in its place.

        Raises:
            CheckpointError: the save failed on some rank; earlier checkpoints are untouched.
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
        """What went wrong first, by rank, as all of them know."""
        said = self.ranks.all_gather_object(None if self._error is None else str(self._error))
        return next((f"on rank {rank}: {text}" for rank, text in enumerate(said) if text is not None), None)

    def _writes(self, tensor: Tensor) -> bool:
        """Whether this rank writes (its part of) a tensor: each shard is written once, by the first what all have."""
        return not is_spare_copy(tensor) if is_sharded(tensor) else self.ranks.is_first

    def _everyones(self, partial: Path) -> dict[str, Any] | None:
        """The index of all parts once they are there; None where another rank failed."""
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
