"""Checkpoints: written atomically, and resumed from bitwise.

A checkpoint is written to a hidden folder, flushed to disk and renamed; a crash at any moment leaves the earlier
checkpoints as they were. Tensors are safetensors, everything else is JSON: nothing is ever unpickled.

    checkpoints/block-000003-step-000012/
        index.json                  schema number; each tensor with dtype, shape, files and SHA-256
        tensors-00001.safetensors   trained weights, optimizer state, random generators, the tokens of a block in flight
        state.json                  progress, KL coefficient, data order, block in flight

Tensors have the dtypes of training. Frozen weights are not stored; they are loaded from their source again. For a
Hugging Face folder export the checkpoint; a finished run leaves one in ``model/``.

A tensor may be stored in pieces, in several files: of several ranks each writes its own shards
(``shared_checkpoint.py``), and any number of ranks can read them. One process writes whole tensors.
"""

import hashlib
import json
import math
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logitless.distributed.sharding import is_sharded, local_part, start_and_shape
from logitless.errors import CheckpointError
from logitless.train.store.atomic import cannot_write, flush, write_flushed
from logitless.train.store.tensor_files import dtype_name, read_places, read_tensor, write_tensors

SCHEMA_NUMBER = 2
"""Schema of the folder."""

LARGEST_FILE = 2**30
"""Most bytes of tensors in a file; a larger tensor has a file of its own."""

_FOLDER = re.compile(r"block-(\d+)-step-(\d+)")
_SAVING, _REMOVING = ".saving-", ".removing-"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint to read from.

    Args:
        tensors: by name; each is read, and its checksum checked, when it is asked for.
        state: everything else.
    """

    folder: Path
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]

    @property
    def has_values(self) -> bool:
        """Whether it holds a value head."""
        return any(name.startswith("parameter/value_head.") for name in self.tensors)


class BackgroundSaver:
    """Writes checkpoints in a thread, while the run samples and scores the next block.

    Tensors are not copied first: call ``wait`` before anything that changes them, such as an optimizer step.

    Example:
        >>> import tempfile
        >>> saver = BackgroundSaver(Path(tempfile.mkdtemp()), keep=1)
        >>> saver.save(block=1, step=4, tensors={"x": torch.ones(2)}, state={})
        >>> saver.wait()
        >>> [path.name for path in checkpoints(saver.root)]
        ['block-000001-step-000004']
    """

    def __init__(self, root: Path, *, keep: int) -> None:
        self.root, self.keep = root, keep
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(
        self,
        *,
        block: int,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        best: str | None = None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to write; ``state`` may change afterwards, tensors may not.

        Args:
            tensors: on any device; one at a time is copied to the host.
            best: name of a checkpoint that is kept, however many come after it.
            settle: called in the thread before the folder appears; may wait for what the checkpoint relies on.

        Raises:
            CheckpointError: the save before this one failed.
        """
        self.wait()
        final = self.root / folder_name(block, step)
        if not self._begins(final):
            return
        mine = {name: tensor for name, tensor in tensors.items() if self._writes(tensor)}
        content, stream = json.dumps(state).encode(), reading_stream(mine)

        def write() -> None:
            try:
                index = self._write(final, mine, stream)
                if index is not None:
                    settle()
                    put_in_place(final, index, content, self.keep, best)
            except OSError as error:
                self._error = cannot_write(final, error, CheckpointError)
            except Exception as error:
                self._error = error
            finally:
                self._is_over()

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint is written.

        Raises:
            CheckpointError: the save failed; earlier checkpoints are unchanged.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _begins(self, final: Path) -> bool:
        """Whether there is something to save; not if it is saved already, or by an earlier start of the same run."""
        return not final.exists()

    def _writes(self, tensor: Tensor) -> bool:
        """Whether this rank writes a tensor."""
        del tensor
        return True

    def _write(
        self, final: Path, tensors: Mapping[str, Tensor], stream: torch.cuda.Stream | None
    ) -> dict[str, Any] | None:
        """Write the tensors on a stream; returns the index of all of them, None if another rank puts it in place."""
        create_partial(final)
        with torch.cuda.stream(stream):
            return write_pieces(partial_of(final), tensors)

    def _is_over(self) -> None:
        """Called in the thread after everything, an error included."""
        if self._error is not None:
            self._remove_partial()

    def _remove_partial(self) -> None:
        for partial in self.root.glob(f"{_SAVING}*"):
            shutil.rmtree(partial, ignore_errors=True)


def reading_stream(tensors: Mapping[str, Tensor]) -> torch.cuda.Stream | None:
    """A stream whose copies wait for work that is queued now, and not for later work; None on a CPU."""
    device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
    if device is None:
        return None
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [(age, path) for path in root.glob("*") if path.is_dir() and (age := _age(path.name)) is not None]
    return [path for _, path in sorted(found)]


def is_first(folder: Path) -> bool:
    """Whether a checkpoint is from before the first block.

    Example:
        >>> is_first(Path("block-000000-step-000000")), is_first(Path("block-000001-step-000004"))
        (True, False)
    """
    return folder.name == folder_name(0, 0)


def clear_remains(root: Path) -> None:
    """Remove what an interrupted save or removal left; the caller holds the run's lock."""
    for path in root.glob(".*"):
        if path.name.startswith((_SAVING, _REMOVING)):
            shutil.rmtree(path)


def load_checkpoint(root: Path) -> Checkpoint:
    """The latest complete checkpoint under ``root``.

    Raises:
        CheckpointError: there is none, its files are damaged, or a later version wrote it.
    """
    found = checkpoints(root)
    if not found:
        raise CheckpointError(
            needed=f"a checkpoint under {root}",
            given="none",
            remedy="Start without --resume, under another name or after removing the run folder.",
        )
    return read_checkpoint(found[-1])


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder.

    Raises:
        CheckpointError: its files are damaged, or a later version wrote it.
    """
    try:
        index = json.loads((folder / "index.json").read_bytes())
        if index["schema_number"] != SCHEMA_NUMBER:
            raise CheckpointError(
                needed=f"a checkpoint of schema {SCHEMA_NUMBER}",
                given=f"schema {index['schema_number']} in {folder}",
                remedy="Continue with the version of logitless that wrote it.",
            )
        content = (folder / "state.json").read_bytes()
        if hashlib.sha256(content).hexdigest() != index["state_sha256"]:
            raise ValueError("state.json does not have the checksum that index.json says")
        return Checkpoint(folder, StoredTensors(folder, index["tensors"]), json.loads(content))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(folder, error) from error


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint; each is read, and its checksum checked, when it is asked for.

    Args:
        index: each tensor's ``dtype``, ``shape`` and ``pieces``; a piece has ``file``, ``start`` (its first index in
            each dimension), ``shape`` and ``sha256``.

    Raises:
        OSError: a file is missing.
        ValueError: a file is truncated, or does not fit the index.
    """

    def __init__(self, folder: Path, index: Mapping[str, Any]) -> None:
        self.folder, self._index = folder, index
        files = {piece["file"] for entry in index.values() for piece in entry["pieces"]}
        if outside := [file for file in files if Path(file).is_absolute() or ".." in Path(file).parts]:
            raise ValueError(f"index.json names {outside[0]!r}, which is not in the folder")
        self._places = {file: read_places(folder / file) for file in files}
        for name, entry in index.items():
            if sum(math.prod(piece["shape"]) for piece in entry["pieces"]) != math.prod(entry["shape"]):
                raise ValueError(f"the pieces of {name!r} are not the whole of it")
            for piece in entry["pieces"]:
                place = self._places[piece["file"]][name]
                if list(place.shape) != piece["shape"] or dtype_name(place.dtype) != entry["dtype"]:
                    raise ValueError(f"{piece['file']} holds another {name!r} than index.json says")

    def __getitem__(self, name: str) -> Tensor:
        """The tensor on the CPU, in memory of its own.

        Raises:
            KeyError: there is no such tensor.
            CheckpointError: its checksum is wrong.
        """
        entry = self._index[name]
        whole: Tensor | None = None
        for piece in entry["pieces"]:
            path = self.folder / piece["file"]
            try:
                part, found = read_tensor(path, self._places[piece["file"]][name])
                if piece["sha256"] != found:
                    raise ValueError(f"{piece['file']} is damaged: {name!r} does not have its checksum")
            except (OSError, ValueError) as error:
                raise damaged(self.folder, error) from error
            if piece["shape"] == entry["shape"]:
                return part
            if whole is None:
                whole = torch.empty(entry["shape"], dtype=part.dtype)
            whole[tuple(slice(s, s + n) for s, n in zip(piece["start"], piece["shape"], strict=True))] = part
        assert whole is not None
        return whole

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._index)

    def __len__(self) -> int:
        """The number of tensors."""
        return len(self._index)


def _age(name: str) -> tuple[int, int] | None:
    """Sort key of a checkpoint's folder, (blocks, steps); None for other folders."""
    found = _FOLDER.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2]))


def folder_name(block: int, step: int) -> str:
    """Name of a checkpoint's folder.

    Example:
        >>> folder_name(3, 12)
        'block-000003-step-000012'
    """
    return f"block-{block:06d}-step-{step:06d}"


def partial_of(final: Path) -> Path:
    """The hidden folder in which a checkpoint is written before it is renamed to ``final``."""
    return final.with_name(f"{_SAVING}{final.name}")


def create_partial(final: Path) -> None:
    """Create ``partial_of`` a checkpoint, empty.

    Raises:
        CheckpointError: the disk is not writable.
    """
    partial = partial_of(final)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise cannot_write(final, error, CheckpointError) from error


def write_pieces(folder: Path, tensors: Mapping[str, Tensor], *, prefix: str = "tensors") -> dict[str, Any]:
    """Write tensors, of sharded ones the local shard, to new files.

    Returns:
        The index's entry for each tensor: dtype, shape of the whole, and the piece that was written.

    Raises:
        OSError: the disk is full or not writable.
    """
    places = {name: start_and_shape(tensor) for name, tensor in tensors.items()}
    parts = {  # of a tensor with few rows some ranks have an empty shard
        name: local_part(tensor)
        for name, tensor in tensors.items()
        if not (is_sharded(tensor) and 0 in places[name][1])
    }
    index: dict[str, Any] = {}
    for number, names in enumerate(_files(parts), start=1):
        file = f"{prefix}-{number:05d}.safetensors"
        sums = write_tensors(folder / file, {name: parts[name] for name in names})
        for name in names:
            start, shape = places[name]
            piece = {"file": file, "start": start, "shape": shape, "sha256": sums[name]}
            index[name] = {
                "dtype": dtype_name(tensors[name].dtype),
                "shape": list(tensors[name].shape),
                "pieces": [piece],
            }
    return index


def put_in_place(final: Path, index: Mapping[str, Any], state: bytes, keep: int, best: str | None) -> None:
    """Write the index and the state, rename the folder, and delete all but the latest ``keep`` and ``best``.

    Raises:
        OSError: the disk is full or not writable.
    """
    partial, age = partial_of(final), _age(final.name)
    assert age is not None
    described = {
        "schema_number": SCHEMA_NUMBER,
        "block": age[0],
        "step": age[1],
        "state_sha256": hashlib.sha256(state).hexdigest(),
        "tensors": index,
    }
    write_flushed(partial / "state.json", state)
    write_flushed(partial / "index.json", json.dumps(described).encode())
    flush(partial)
    partial.rename(final)
    flush(final.parent)
    for old in checkpoints(final.parent)[:-keep]:
        if old.name == best:
            continue
        removed = old.rename(old.with_name(f"{_REMOVING}{old.name}"))  # first, so that no half checkpoint is ever seen
        shutil.rmtree(removed)


def _files(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of the tensors in each file, in order."""
    files, size = list[list[str]](), 0
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if not files or size > LARGEST_FILE:
            files.append([])
            size = tensor.nbytes
        files[-1].append(name)
    return files


def damaged(folder: Path, error: Exception) -> CheckpointError:
    """The error for a checkpoint whose files do not hold what they should."""
    return CheckpointError(
        needed=f"readable files in {folder}",
        given=f"{type(error).__name__}: {error}" if isinstance(error, KeyError | TypeError) else str(error),
        remedy="Delete this checkpoint to continue from the one before it.",
    )
