"""Arguments and checks that several commands share."""

import argparse
from pathlib import Path

from logitless.errors import ConfigurationError


def add_overrides(parser: argparse.ArgumentParser, meaning: str = "replace a value (repeatable)") -> None:
    """``--set KEY=VALUE`` as ``overrides``."""
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=meaning)


def add_run(parser: argparse.ArgumentParser) -> None:
    """A run folder as ``run``."""
    parser.add_argument("run", type=Path, help="run folder, for example runs/quickstart")


def add_checkpoint(
    parser: argparse.ArgumentParser, meaning: str = "latest (default), best, model, a block's number or a name"
) -> None:
    """``--checkpoint WHICH``."""
    parser.add_argument("--checkpoint", default="latest", metavar="WHICH", help=meaning)


def check_at_least(option: str, given: int, least: int) -> None:
    """Refuse a number below ``least``.

    Example:
        >>> check_at_least("--samples", 1, 1)
    """
    if given < least:
        raise ConfigurationError(needed=f"{option} of at least {least}", given=str(given), remedy="Leave it out.")


def check_output_file(option: str, path: Path | None, kind: str = "a file", suffixes: tuple[str, ...] = ()) -> None:
    """Refuse a path that cannot become a file, or is one already, before work is done for it.

    Args:
        option: that names the path.
        path: of the file to be written; None: none.
        kind: of file, in words.
        suffixes: that it may have; empty: any.
    """
    if path is None:
        return
    if path.is_file():
        raise ConfigurationError(
            needed=f"nothing at {path}, for {option}", given="a file", remedy="Remove it, or name another file."
        )
    writable = not path.is_dir() and path.absolute().parent.is_dir() and path.suffix in (suffixes or (path.suffix,))
    if not writable:
        raise ConfigurationError(
            needed=f"{kind} in an existing folder for {option}",
            given=str(path),
            remedy="Make the folder first, or name another file.",
        )
