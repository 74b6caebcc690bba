"""The presets of docs/objectives.md and their pictures: words and equations are docstrings', gradients evaluated.

They stand between the page's marks. A preset's docstring has its Source, what other libraries call it (Elsewhere) and
where they differ (Notes). Equations are the paragraphs in double backticks of its parts' docstrings.
"""

import dataclasses
import hashlib
import inspect
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import matplotlib
import torch
from matplotlib.figure import Figure

from docs.generate import renewed
from logitless.errors import ConfigurationError
from logitless.objective.advantage import Advantage
from logitless.objective.algorithm import Algorithm
from logitless.objective.presets import PRESETS
from logitless.objective.surrogate import Surrogate
from logitless.objective.value import ValueLoss
from logitless.types import TokenBatch

COST = Path(__file__).parents[2] / "benchmarks" / "results" / "objective.json"
TOLERANCE = 1e-6
NUM_POINTS = 120
POSITIVE, NEGATIVE = "A = +1", "A = -1"

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "logitless",
    "font.size": 8.0,
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e2e8f0",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "legend.columnspacing": 1.0,
}
_LINES: Mapping[str, dict[str, Any]] = {
    POSITIVE: {"color": "#2563eb", "linewidth": 2.6},
    NEGATIVE: {"color": "#ea580c", "linewidth": 1.5},
}


_AXES: Mapping[str, tuple[float, float]] = {
    "gspo": (0.9985, 1.0015),
    "gspo_token": (0.9985, 1.0015),
    "luspo": (0.99, 1.01),
    "cispo": (0.0, 8.0),
    "sapo": (0.0, 4.0),
    "vespo": (0.0, 4.0),
    "gmpo": (0.0, 2.4),
    "dppo": (0.0, 3.0),
    "ipo": (0.0, 3.0),
    "kpop": (0.0, 3.0),
    "dro": (0.0, 4.0),
}
"""Ends of a picture's axis of ratios where they are not 0 and 2: no bound falls on a point of ``ratios``."""

_PROBABILITY_OLD: Mapping[str, float] = {"dppo": 0.3, "ipo": 0.3, "kpop": 0.3}
"""Of the token in the picture, where it is not 0.1; only a trust region in probability reads it."""

Curves = dict[str, list[float]]


def axis(name: str) -> tuple[float, float]:
    """Ends of the ratio in a preset's picture."""
    return _AXES.get(name, (0.0, 2.0))


def ratios(name: str) -> torch.Tensor:
    """The ratios at which a picture is drawn: the middles of equal cells, so that round bounds fall between two.

    Example:
        >>> ratios("grpo")[:2]
        tensor([0.0083, 0.0250], dtype=torch.float64)
    """
    low, high = axis(name)
    return low + (torch.arange(NUM_POINTS, dtype=torch.float64) + 0.5) * ((high - low) / NUM_POINTS)


def curves(name: str) -> Curves:
    """``d loss / d logp`` of a preset for both signs of the advantage, to seven decimals.

    Example:
        >>> curves("nll")["A = +1"][0]
        -1.0
    """
    objective = PRESETS[name]().objective
    log_ratio = ratios(name).log()
    logp_old = torch.full_like(log_ratio, _PROBABILITY_OLD.get(name, 0.1)).log()
    drawn: Curves = {}
    for chosen in (False, True) if "selected" in objective.needs else (False,):
        for label, advantage in ((POSITIVE, 1.0), (NEGATIVE, -1.0)):
            batch = TokenBatch(
                sequence=torch.arange(NUM_POINTS),
                num_sequences=NUM_POINTS,
                advantage=torch.full_like(log_ratio, advantage),
                token_weight=torch.ones_like(log_ratio),
                logp_old=logp_old,
                logp_ref=logp_old,
                selected=torch.full((NUM_POINTS,), chosen),
            )
            gradient = objective((logp_old + log_ratio).requires_grad_(), None, batch).grad_logp
            assert gradient is not None
            drawn[f"{label}, chosen" if chosen else label] = [round(g, 7) + 0.0 for g in gradient.tolist()]
    return drawn


def picture(name: str, drawn: Curves) -> str:
    """The curves of a preset as SVG; its description is ``digest(drawn)``."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.2, 2.3), layout="constrained")
        axes = figure.add_subplot()
        axes.axhline(0.0, color="#94a3b8", linewidth=0.8)
        axes.axvline(1.0, color="#94a3b8", linewidth=0.8, linestyle=":")
        x = ratios(name).tolist()
        for label, y in drawn.items():
            sign = label.removesuffix(", chosen")
            axes.plot(x, y, label=label, linestyle="-" if label == sign else "--", **_LINES[sign])
        axes.set_xlim(*axis(name))
        axes.locator_params(axis="x", nbins=6)
        axes.set_xlabel("ratio")
        axes.set_ylabel("d loss / d logp")
        figure.legend(loc="outside upper left", ncols=len(drawn))
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Description": digest(drawn)})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def digest(drawn: Curves) -> str:
    """What ties a picture to its numbers."""
    return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()


def page(text: str) -> str:
    """docs/objectives.md with what stands between its marks made anew.

    Raises:
        ConfigurationError: a preset that does not say where it comes from.
    """
    measured = json.loads(COST.read_text(encoding="utf-8")) if COST.is_file() else None
    for part, fresh in (("presets", _presets()), ("equations", _equations()), ("cost", cost(measured))):
        begin, end = f"<!-- {part}: begin (made by `make docs`) -->", f"<!-- {part}: end -->"
        text = renewed(text, begin, f"\n\n{fresh}\n\n", end)
    return text


def _presets() -> str:
    """A table of all, and a section of each."""
    rows = ["| preset | surrogate | advantage | weighting |", "|---|---|---|---|"]
    for name, preset in PRESETS.items():
        ratio, *cells = list(_composition(preset()).values())[:4]
        surrogate, advantage, weighting = (f"`{cell}`" if cell else "–" for cell in cells)
        level = f" of the `{ratio}` ratio" if ratio not in ("", "token") else ""
        rows.append(f"| [`{name}`](#{name}) | {surrogate}{level} | {advantage} | {weighting} |")
    return "\n".join([*rows, "", *(_section(name) for name in PRESETS)]).rstrip()


def cost(measured: Mapping[str, Any] | None) -> str:
    """What ``benchmarks/objective.py`` found, in words.

    Example:
        >>> cost(None)
        'Not measured yet: run `python benchmarks/objective.py` on a GPU.'
    """
    if measured is None:
        return "Not measured yet: run `python benchmarks/objective.py` on a GPU."
    alone = [row for row in measured["rows"] if not row["diagnostics"]]
    watched = [row for row in measured["rows"] if row["diagnostics"]]
    head, machine = measured["head"], measured["environment"]
    peak = max(row["peak_bytes_per_token"] for row in measured["rows"])
    return (
        f"On {measured['tokens']} tokens in {measured['sequences']} sequences, forward and backward of an "
        f"objective take\n{_range(alone)}\nof the time of one bfloat16 product with a head of {head['width']} x "
        f"{head['vocabulary']} in the same run ({measured['product_ms']:.0f} ms); with the step's diagnostics\n"
        f"{_range(watched)}.\nThey allocate at most {peak:.0f} bytes a token. "
        f"({machine['gpu']}, driver {machine['driver']}, torch {machine['torch']};\n"
        "[result file](../benchmarks/results/objective.json), by `benchmarks/objective.py`.)"
    )


def _range(rows: Sequence[Mapping[str, Any]]) -> str:
    """The cheapest and the dearest objective."""
    low, *_, high = sorted(rows, key=lambda row: float(row["ratio_to_product"]))
    shares = [f"{row['ratio_to_product']:.2%} (`{row['objective']}`)" for row in (low, high)]
    return " to ".join(shares)


def outdated(folder: Path) -> list[str]:
    """Numbers and pictures in ``folder`` that are not as the code has them, in words; empty where all is current."""
    found = []
    numbers = folder / "gradients.json"
    kept: dict[str, Curves] = json.loads(numbers.read_text(encoding="utf-8")) if numbers.is_file() else {}
    if kept.keys() != PRESETS.keys():
        found.append("gradients.json: other presets")
    for name in kept.keys() & PRESETS.keys():
        if not _close(kept[name], curves(name)):
            found.append(f"gradients.json: {name}")
        drawn = folder / f"{name}.svg"
        if not drawn.is_file() or digest(kept[name]) not in drawn.read_text(encoding="utf-8"):
            found.append(drawn.name)
    return sorted(found)


def draw(folder: Path) -> None:
    """Write the numbers and the pictures of all presets."""
    drawn = {name: curves(name) for name in PRESETS}
    lines = (
        f'"{name}": {{\n' + ",\n".join(f"  {json.dumps(label)}: {json.dumps(y)}" for label, y in each.items()) + "\n}"
        for name, each in drawn.items()
    )
    (folder / "gradients.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    for name, each in drawn.items():
        (folder / f"{name}.svg").write_text(picture(name, each), encoding="utf-8")


def _close(some: Curves, others: Curves) -> bool:
    return some.keys() == others.keys() and all(
        len(y) == len(others[label]) and max(abs(a - b) for a, b in zip(y, others[label], strict=True)) <= TOLERANCE
        for label, y in some.items()
    )


def _section(name: str) -> str:
    preset = PRESETS[name]
    first, *paragraphs = _paragraphs(preset)
    said = dict(paragraph.split(":", 1) for paragraph in paragraphs)
    if "Source" not in said:
        raise ConfigurationError(
            needed=f"where the preset {name!r} comes from", given="none", remedy="Add `Source:` to its docstring."
        )
    parameters = inspect.signature(preset).parameters.values()
    opening = [first, f"Source: {' '.join(said['Source'].split())}"]
    if given := ", ".join(f"`{each.name}={_number(each.default)}`" for each in parameters):
        opening.append(f"Parameters: {given}.")
    if value_loss := _composition(preset())["value loss"]:
        opening.append(f"[Value loss](#advantages): `{value_loss}`.")
    names = [item.split(": ", 1) for item in _items(said.get("Elsewhere", ""))]
    return "\n".join(
        [
            f"### {name}\n",
            " ".join(opening) + "\n",
            f"![gradient](objectives/{name}.svg)\n",
            *([f"- {'; '.join(f'**{library}:** {called}' for library, called in names)}"] if names else []),
            *_items(said.get("Notes", "")),
            "",
        ]
    )


def _paragraphs(of: Any) -> list[str]:
    """Of a docstring, in Markdown; an Example is left out."""
    text = (inspect.getdoc(of) or "").replace("``", "`")
    return [each for each in text.split("\n\n") if not each.startswith("Example:")]


def _items(text: str) -> list[str]:
    """The lines of a section, what is indented further joined to the line before it.

    Example:
        >>> _items("\\n    - one\\n      item\\n    - another")
        ['- one item', '- another']
    """
    return [" ".join(item.split()) for item in re.split(r"\n    (?! )", text)[1:]]


def _equations() -> str:
    """A section with the equation of each surrogate, and one of each advantage, by their names."""
    lines = []
    for title, union in (("Surrogates", Surrogate), ("Advantages", Advantage)):
        lines += [f"## {title}", ""]
        for part in get_args(union):
            lines += [f"`{part.name}`:", "", *(f"    {line}" for line in _equation(part)), ""]
    return "\n".join([*lines, "The value loss:", "", *(f"    {line}" for line in _equation(ValueLoss))])


def _equation(part: type) -> list[str]:
    """Of a docstring, and those of the functions that its first paragraph names; a loss comes first."""
    first, *own = _paragraphs(part)
    functions = [getattr(sys.modules[part.__module__], name, None) for name in re.findall(r"`(\w+)`", first)]
    named = [each for of in functions if of is not None for each in _paragraphs(of)[1:]]
    lines = [line for each in named + own if each.startswith("`") for line in each.replace("`", "").splitlines()]
    return sorted(lines, key=lambda line: not line.startswith("l = "))


def _composition(algorithm: Algorithm) -> dict[str, str]:
    """The parts of an algorithm as its objects have them."""
    surrogate = algorithm.objective.surrogate
    parts = {
        "ratio": algorithm.objective.ratio if surrogate.reads != "none" else None,
        "surrogate": surrogate,
        "advantage": algorithm.advantage,
        "weighting": algorithm.weighting,
        "value loss": algorithm.value_loss,
    }
    whole = ("value loss",)
    return {name: "" if part is None else _spelled(part, whole=name in whole) for name, part in parts.items()}


def _spelled(part: Any, *, whole: bool) -> str:
    """A part with its values, those that are off left out, and unless whole those that are as the class has them."""
    values = {each.name: getattr(part, each.name) for each in dataclasses.fields(part)}
    name = values.pop("name", "")
    usual = {each.name: each.default for each in dataclasses.fields(part)}
    values = {key: value for key, value in values.items() if whole or value != usual[key]}
    inner = ", ".join(f"{key}={_number(value)}" for key, value in values.items() if value is not None)
    return f"{name}({inner})" if name and inner else name or inner


def _number(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)
