"""The table of ``docs/tinker.md``, from what ``tests/tinker/operations.py`` found."""

import json
from pathlib import Path

from docs.generate import renewed

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "tinker_operations.json"


def page(text: str) -> str:
    """The page with its table of the SDK's operations.

    Example:
        >>> print(page("|---|---|---|\\n").splitlines()[1][:27])
        | `ServiceClient` | `close`
    """
    found: dict[str, str] = json.loads(RESULTS.read_text(encoding="utf-8"))["operations"]
    groups = dict.fromkeys(name.replace(".", " ").split()[0] for name in found)
    rows = []
    for group in groups:
        own = {name[len(group) + 1 :]: result == "served" for name, result in found.items() if name.startswith(group)}
        served, refused = (", ".join(f"`{n}`" for n in sorted(own) if own[n] is kind) for kind in (True, False))
        rows.append(f"| `{group}` | {served or '-'} | {refused or '-'} |\n")
    return renewed(text, "|---|---|---|\n", "".join(rows))
