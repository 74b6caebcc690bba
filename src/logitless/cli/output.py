"""Output that may end before the run does."""

import hashlib
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO


class _Patient:
    """A stream whose reader may go away (``| head``, a closed terminal); later writes are then discarded."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._give_up()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self) -> None:
        """Point the stream's descriptor at /dev/null, also for what is still in its buffer."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def visible(text: str) -> str:
    """A model's text with control characters replaced, which could move the cursor or colour the terminal.

    Example:
        >>> visible("two\\nlines\\x1b[2J")
        'two\\nlines�[2J'
    """
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in text)


def program() -> str:
    """How a shell calls this program from here: by its name, or by a path while its environment is not activated."""
    if shutil.which("logitless") is not None:
        return "logitless"
    started = shlex.quote(sys.argv[0])  # by a relative path as by `make demo`
    return started if Path(sys.argv[0]).name == "logitless" else f"{shlex.quote(sys.executable)} -m logitless"


def is_first_to_say(text: str) -> bool:
    """Whether no other process that torchrun started on this machine has said it, as all would of a wrong recipe.

    Example:
        >>> is_first_to_say("needed a valid recipe")
        True
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # in a folder a process, beside each other in one of this attempt
    if file is None:
        return True
    try:
        (Path(file).parents[1] / hashlib.sha256(text.encode()).hexdigest()).touch(exist_ok=False)
    except OSError as error:
        return not isinstance(error, FileExistsError)
    return True


def tell_torchrun(text: str) -> None:
    """Have torchrun end with this error of its process, where it would name a page about tracebacks.

    Example:
        >>> tell_torchrun("needed all 2 ranks")
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is not None:
        written = Path(f"{file}.part")  # torchrun would fail by half a file
        with suppress(OSError):  # as on a full disk: torchrun says less
            more = {"py_callstack": text, "timestamp": str(int(time.time()))}
            written.write_text(json.dumps({"message": {"message": text, "extraInfo": more}}), encoding="utf-8")
            written.replace(file)


@contextmanager
def patient_output() -> Iterator[None]:
    """Inside, the command goes on if the reader of its output goes away.

    Example:
        >>> with patient_output():
        ...     print("still here")
        still here
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Patient(sys.stdout), _Patient(sys.stderr)  # type: ignore[assignment]
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before
