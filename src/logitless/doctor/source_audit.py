"""Likely mistakes in somebody's training code, which is read and never run.

Files are parsed with ``ast`` and not imported. A rule knows a few forms of a mistake, not what a program does: it can
miss one, and it can be wrong.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from logitless.doctor.finding import Finding
from logitless.doctor.source_code import Module
from logitless.doctor.source_rules import RULES, TREE_RULES
from logitless.errors import DataError

MAX_FILE_BYTES = 2_000_000
"""Longer files hold data rather than code; they are not read, and named."""

_LEFT_OUT = {".git", ".venv", "venv", "node_modules", "__pycache__", "site-packages"}

NUM_RULES = len(RULES) + len(TREE_RULES)


def audit_source(folder: Path) -> tuple[list[Finding], list[str]]:
    """Read every ``.py`` and ``.ipynb`` file below a folder, or one file.

    Args:
        folder: links are not followed.

    Returns:
        The findings, by file and line, and the files that could not be read, each with the reason.

    Raises:
        DataError: there is no Python to read.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "train.py").write_text("advantages = (rewards - rewards.mean()) / rewards.std()")
        >>> findings, unread = audit_source(folder)
        >>> [(finding.rule, finding.place) for finding in findings], unread
        ([('centred over the batch', 'train.py:1')], [])
    """
    modules, unread = [], []
    for path in _files(folder):
        name = path.relative_to(folder).as_posix() if path != folder else path.name
        try:
            modules.append(Module.parse(name, _code(path)))
        except (SyntaxError, ValueError, RecursionError, OSError) as error:
            unread.append(f"{name}: {error}")
    if not modules:
        raise DataError(
            needed=f"Python files below {folder}",
            given="; ".join(unread) or "none",
            remedy="Name the folder of the training code.",
        )
    found = [finding for module in modules for look in RULES for finding in look(module)]
    found.sort(key=lambda finding: (finding.place.rpartition(":")[0], int(finding.place.rpartition(":")[2])))
    return [*found, *(finding for rule in TREE_RULES for finding in rule(modules))], unread


def _files(folder: Path) -> Sequence[Path]:
    if folder.is_file():
        return [folder]
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT)
        paths = (Path(parent, name) for name in sorted(names) if name.endswith((".py", ".ipynb")))
        found += [path for path in paths if path.is_file() and not path.is_symlink()]
    return found


def _code(path: Path) -> str:
    """The text of a script, or the code cells of a notebook with lines for a shell or a magic blanked."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"more than {MAX_FILE_BYTES:,} bytes")
    text = path.read_text(encoding="utf-8", errors="replace")
    return "\n".join(_cells(text)) if path.suffix == ".ipynb" else text


def _cells(text: str) -> Iterator[str]:
    notebook = json.loads(text)
    for cell in notebook.get("cells", ()) if isinstance(notebook, dict) else ():
        if cell.get("cell_type") == "code":
            for line in "".join(cell.get("source", ())).splitlines():
                yield "" if line.lstrip().startswith(("!", "%")) else line
