"""Every command line that a page shows is one that the command line takes."""

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from logitless.cli.main import COMMANDS, module_of

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: Path) -> list[list[str]]:
    """The words of each line that begins with ``logitless``, lines that end with a backslash joined."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^(?:    )?(?:\$ )?logitless ([^\n`]*)$", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_line_that_a_page_shows_is_taken(page: Path) -> None:
    for words in commands(page):
        if not words or words[0] not in COMMANDS or "..." in words:  # a sentence, or a line that leaves words out
            continue
        parser = argparse.ArgumentParser(exit_on_error=False)
        importlib.import_module(module_of(words[0])).add_arguments(parser)
        try:
            parser.parse_args(words[1:])
        except (SystemExit, argparse.ArgumentError) as error:
            pytest.fail(f"{page.name}: logitless {' '.join(words)}: {error}")


def test_pages_show_commands_at_all() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 25
