"""The table of ``docs/rollout_data.md``."""

from docs.generate import renewed
from logitless.train.record.rollout_data import COLUMNS


def page(text: str) -> str:
    """The page with its table of columns.

    Example:
        >>> print(page("|---|---|---|\\n| `reward/<function>` |").splitlines()[1])
        | `block` | int64 | rollout batch, from 1 |
    """
    rows = [f"| `{name}` | {kind} | {meaning} |\n" for name, (kind, meaning) in COLUMNS.items()]
    return renewed(text, "|---|---|---|\n", "".join(rows), "| `reward/<function>` |")
