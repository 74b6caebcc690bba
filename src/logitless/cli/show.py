"""``logitless show RUN``: a group that a run sampled, with the verdicts of each completion."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from logitless.cli.arguments import add_run
from logitless.cli.loading import loading
from logitless.cli.output import visible
from logitless.errors import ConfigurationError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run and which group."""
    add_run(parser)
    parser.add_argument("--block", type=int, metavar="N", help="from 1; default: the last one")
    parser.add_argument("--group", type=int, default=1, metavar="N", help="of the block, from 1 (default 1)")


def run(options: argparse.Namespace) -> int:
    """Print the group."""
    with loading("show"):
        from logitless.train.record.run_folder import open_run_folder
    folder = open_run_folder(options.run)
    block = options.block if options.block is not None else max(folder.rollout_blocks(), default=1)
    groups = [list(rows) for _, rows in groupby(folder.read_block(block), key=lambda row: row["group"])]
    if not 1 <= options.group <= len(groups):
        raise ConfigurationError(
            needed=f"a group of block {block}, 1 to {len(groups)}",
            given=str(options.group),
            remedy="Name one of these with --group.",
        )
    of_group = f"group {options.group} of {len(groups)}"
    console = Console(highlight=False, file=sys.stdout)
    for part in _page(f"{folder.path.name}, block {block}, {of_group}", groups[options.group - 1]):
        console.print(part, soft_wrap=True)
    return 0


def _page(title: str, rows: Sequence[Mapping[str, Any]]) -> list[Rule | Text]:
    parts = [
        Text(f"{title}, prompt {visible(rows[0]['prompt_id'])}", style="bold"),
        Text(visible(rows[0]["prompt"])),
    ]
    page: list[Rule | Text] = [*parts]
    for number, row in enumerate(rows, start=1):
        said = [f"{number} of {len(rows)}", f"reward {_number(row['reward'])}"]
        said += [f"advantage {_number(row['advantage'])}", f"{row['num_tokens']} tokens", f"ended by {_end(row)}"]
        # below the rule: as its title it would be cut at the terminal's width
        page += [Rule(), Text(", ".join(said), style="bold"), *_said(row)]
        for name, verdict in json.loads(row["verdicts"]).items():
            page.append(Text(f"  {visible(name)}: {_verdict(verdict)}", style="dim"))
    return page


def _said(row: Mapping[str, Any]) -> list[Text]:
    """The text of a completion, or the messages of a conversation, each below its role."""
    from logitless.train.record.rollout_data import turns

    said: list[Text] = []
    for role, text in turns(row):
        said += [Text(visible(f"{role}:"), style="bold")] if role else []
        said.append(Text(visible(text)))
    return said


def _verdict(verdict: Mapping[str, Any]) -> str:
    said = [f"{verdict['status']} {_number(verdict['score'])}"]
    said += [json.dumps(verdict["detail"], ensure_ascii=False)] if verdict.get("detail") else []
    said += [verdict["message"]] if verdict.get("message") else []
    return visible("; ".join(said))


def _end(row: Mapping[str, Any]) -> str:
    return "a stop" if row["finish_reason"] == "stop" else "the length limit"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
