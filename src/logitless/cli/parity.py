"""``logitless parity``: the same batch through two implementations, row by row."""

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from logitless.cli.loading import loading

if TYPE_CHECKING:
    from logitless.bench.parity import Row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to compare with, and the form of the output."""
    parser.add_argument(
        "--against",
        action="append",
        choices=("trl", "liger"),
        help="the installed package's own loss; may be repeated (default: this machine's head backends)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows and nothing else")
    parser.add_argument("--quick", action="store_true", help="only some of the rows")


def run(options: argparse.Namespace) -> int:
    """Print every row; 1 when one exceeds its tolerance."""
    rows = list(_rows(options.against, quick=options.quick))
    if options.json:
        print(json.dumps([row.as_json() for row in rows], indent=1))
    else:
        _print(rows)
    return 0 if all(row.ok for row in rows) else 1


def _rows(against: Sequence[str] | None, *, quick: bool) -> "list[Row]":
    with loading("parity"):
        from logitless.bench.parity import against_reference
    if not against:
        return list(against_reference(quick=quick))
    rows: list[Row] = []
    if "trl" in against:
        from logitless.bench.parity_distillation import distillation_rows
        from logitless.bench.parity_trl import against_trl

        rows += against_trl(quick=quick)
        if not quick:
            rows += distillation_rows()
    if "liger" in against:
        from logitless.bench.parity_liger import against_liger
        from logitless.integrations.liger import LigerFusedLinearGRPOLoss

        rows += against_liger(LigerFusedLinearGRPOLoss, quick=quick)
    return rows


def _print(rows: "Sequence[Row]") -> None:
    from logitless.bench.parity import worst

    table = Table("name", "against", "loss_rel", "grad_rel", "tolerance", "ok", "note", box=None)
    for row in rows:
        ok = "[green]yes[/]" if row.ok else "[red]NO[/]"
        table.add_row(
            row.name, row.against, f"{row.loss_rel:.1e}", f"{row.grad_rel:.1e}", f"{row.tolerance:.0e}", ok, row.note
        )
    console = Console()
    console.print(table)
    for against, row in worst(rows).items():
        number = sum(each.against == against for each in rows)
        failed = sum(each.against == against and not each.ok for each in rows)
        console.print(
            f"{against}: {number} rows, {failed} beyond tolerance; largest difference in {row.name!r}", highlight=False
        )
