"""Saved adapters as folders that PEFT reads.

    <folder>/lock.json                       while a service uses it
    <folder>/<training run>/<kind>/<name>/   adapter_model.safetensors, adapter_config.json, checkpoint.json
                                             and, of ``weights``, optimizer.safetensors after the first step

A folder is written beside its place and renamed, so that one that exists is whole, also after the process was killed.
One that is overwritten is kept beside its place until the new one stands there.
"""

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from logitless.errors import CheckpointError, InputError
from logitless.installed import optional
from logitless.tinker.adapter import Shape
from logitless.train.store.atomic import replace_folder
from logitless.train.store.run_lock import locked

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""The second part of a path, and what the SDK calls such a checkpoint."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_-]{0,127}")


@dataclass(frozen=True)
class Checkpoint:
    """What is known of a saved adapter.

    Args:
        run: training run, which is the id of its model.
        kind: from ``KINDS``.
        name: in its kind.
        base_model: name of it.
        shape: of the adapter.
        owner: digest of the key of who saved it.
        created, expires: in seconds since 1970; None: never.
        size: bytes of its files.
        user_metadata: of the client.
    """

    run: str
    kind: str
    name: str
    base_model: str
    shape: Shape
    owner: str
    created: float
    expires: float | None = None
    size: int = 0
    user_metadata: dict[str, str] | None = None

    @property
    def path(self) -> str:
        """As clients name it."""
        return f"tinker://{self.run}/{self.kind}/{self.name}"


@contextmanager
def opened(folder: Path) -> Iterator["Store"]:
    """The checkpoints of a folder, which no other process can open meanwhile; what a killed one left is removed.

    Raises:
        ConfigurationError: another process has opened it.
        CheckpointError: the folder cannot be written.
    """
    store = Store(folder)
    with locked(folder, kind="folder of checkpoints", another="name another --folder"):
        store.remove_unfinished()
        yield store


class Store:
    """The checkpoints of a folder, which is created; ``opened`` keeps other processes out of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._changing = threading.RLock()  # one thread saves while another says what is there
        try:
            folder.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()  # found out now, not by the first save after hours
        except OSError as error:
            raise _not_writable(folder, error) from error

    def remove_unfinished(self) -> None:
        """Remove the saves that a killed process was writing, and put back the checkpoints that it was replacing.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        try:
            for part in self.folder.glob("*/*/.*.part"):  # killed while writing
                shutil.rmtree(part)
            for old in self.folder.glob("*/*/.*.old"):  # killed between two renames
                place = old.with_name(old.name[1:].removesuffix(".old"))
                if place.exists():
                    shutil.rmtree(old)
                else:
                    old.rename(place)
        except OSError as error:
            raise _not_writable(self.folder, error) from error

    def place(self, run: str, kind: str, name: str) -> Path:
        """The folder of a checkpoint, which need not exist.

        Raises:
            InputError: a name that could lead elsewhere.
        """
        if kind not in KINDS or not _RUN.fullmatch(run) or not _NAME.fullmatch(name):
            raise InputError(
                needed="a checkpoint as tinker://RUN/weights/NAME, NAME of letters, digits, dot, dash and underscore",
                given=(f"tinker://{run}/{kind}/{name}" if run else name)[:200],
                remedy="Choose a plain name of at most 128 characters.",
            )
        return self.folder / run / kind / name

    def save(
        self,
        checkpoint: Checkpoint,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        peft_config: Any,
        *,
        overwrite: bool = False,
        recipients: Sequence[str] = (),
    ) -> Checkpoint:
        """Write a checkpoint; returns it with its size.

        Args:
            checkpoint: without its size.
            tensors, state: factors and Adam's state.
            peft_config: of the adapter.
            overwrite: whether the name may be taken.
            recipients: age keys that all files are encrypted to, as ``NAME.age``; none: they are plain.

        Raises:
            InputError: there is one of this name already, the name is not allowed, or no recipient can be read.
            CheckpointError: the folder cannot be written.
            UnavailableError: pyrage is needed to encrypt.
        """
        place = self.place(checkpoint.run, checkpoint.kind, checkpoint.name)
        if not overwrite and self._read(place) is not None:
            remedy = "Pass overwrite=True, or choose another." if checkpoint.kind == "weights" else "Choose another."
            raise InputError(needed="a name that is free", given=checkpoint.path, remedy=remedy)
        part = place.with_name(f".{place.name}.part")
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            save_file(dict(tensors), part / "adapter_model.safetensors")
            if state:
                save_file({name: value.contiguous() for name, value in state.items()}, part / "optimizer.safetensors")
            peft_config.save_pretrained(str(part))
            if recipients:
                _encrypt(part, recipients)
            size = sum(file.stat().st_size for file in part.iterdir())
            made = Checkpoint(**{**vars(checkpoint), "size": size})
            (part / "checkpoint.json").write_text(json.dumps(asdict(made)))
            with self._changing:
                replace_folder(place, part)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                needed="a folder that can be written",
                given=f"{str(place)!r}: {error}",
                remedy="Free disk space, or start the service with another --folder.",
            ) from error
        return made

    def find(self, path: str) -> Checkpoint:
        """The checkpoint of a ``tinker://`` path.

        Raises:
            InputError: there is none.
        """
        parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(parts) != 3:
            parts = ["", "", path]
        found = self._read(self.place(*parts))
        if found is None:
            raise InputError(
                needed="a checkpoint that was saved here",
                given=path[:200],
                remedy="List them with the SDK's RestClient.",
            )
        return found

    def tensors(self, checkpoint: Checkpoint, *, optimizer: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The factors, and Adam's state if wanted and saved; empty otherwise.

        Raises:
            InputError: the checkpoint is encrypted.
        """
        place = self.place(checkpoint.run, checkpoint.kind, checkpoint.name)
        if (place / "adapter_model.safetensors.age").exists():
            raise InputError(
                needed="a checkpoint that can be read here",
                given=f"{checkpoint.path}, which is encrypted",
                remedy="Download and decrypt it.",
            )
        state = place / "optimizer.safetensors"
        factors = load_file(place / "adapter_model.safetensors")
        return factors, load_file(state) if optimizer and state.is_file() else {}

    def all(self, owner: str, run: str | None = None) -> list[Checkpoint]:
        """The checkpoints of an owner, newest first; those that have expired are deleted."""
        with self._changing:
            found = [self._read(file.parent) for file in self.folder.glob("*/*/[!.]*/checkpoint.json")]
        own = [each for each in found if each is not None and each.owner == owner and run in (None, each.run)]
        return sorted(own, key=lambda each: each.created, reverse=True)

    def delete(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint."""
        with self._changing:
            _delete(self.place(checkpoint.run, checkpoint.kind, checkpoint.name))

    def expire(self, checkpoint: Checkpoint, expires: float | None) -> None:
        """Set when a checkpoint expires."""
        place = self.place(checkpoint.run, checkpoint.kind, checkpoint.name)
        with self._changing:
            if (found := self._read(place)) is None:
                return
            part = place / ".checkpoint.part"
            part.write_text(json.dumps(asdict(replace(found, expires=expires))))
            part.rename(place / "checkpoint.json")

    def _read(self, place: Path) -> Checkpoint | None:
        with self._changing:
            try:
                raw = json.loads((place / "checkpoint.json").read_text())
            except (OSError, ValueError):
                return None
            found = Checkpoint(**{**raw, "shape": Shape(**raw["shape"])})
            if found.expires is not None and found.expires < time.time():
                _delete(place)
                return None
            return found


def _delete(place: Path) -> None:
    """Delete the folder of a checkpoint. It is renamed first, so that what is left after a kill is no checkpoint."""
    part = place.with_name(f".{place.name}~.part")  # no checkpoint's name has a tilde
    shutil.rmtree(part, ignore_errors=True)
    with suppress(OSError):
        place.rename(part)
    shutil.rmtree(part, ignore_errors=True)


def _not_writable(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        needed="a folder for checkpoints that can be written",
        given=f"{str(folder)!r}: {error}",
        remedy="Name another --folder.",
    )


def _encrypt(folder: Path, recipients: Sequence[str]) -> None:
    """Encrypt the files of a folder by age."""
    pyrage = optional("pyrage", extra="tinker", needed="pyrage, which encrypts")
    keys = []
    for text in recipients:
        kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
        try:
            keys.append(kind.Recipient.from_str(text))
        except pyrage.RecipientError as error:
            raise InputError(
                needed="age recipients: age1... or an SSH public key",
                given=f"{text!r:.80}: {error}",
                remedy="Make one with age-keygen.",
            ) from error
    for file in list(folder.iterdir()):
        pyrage.encrypt_file(str(file), f"{file}.age", keys)
        file.unlink()
