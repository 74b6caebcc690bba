"""Write ``docs/configuration.md`` from the types of a recipe: ``python -m logitless.train.document [--check]``.

Keys, types and defaults are read from the types themselves, descriptions from pydantic's fields and from the ``Args``
of dataclass docstrings, so that the page cannot say what the program does not do.
"""

import dataclasses
import inspect
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel

from logitless import pages
from logitless.objective.presets import PRESETS
from logitless.train import rollout_data
from logitless.train.config import Recipe
from logitless.train.metrics import metrics_page

PAGE = Path("docs/configuration.md")
METRICS_PAGE = Path("docs/metrics.md")
ROLLOUTS_PAGE = Path("docs/rollout_data.md")

INTRODUCTION = """# Configuration

Every key of a recipe. This page is written from the types; change them and run `python -m logitless.train.document`.

A recipe is one YAML file. `logitless train RECIPE --set a.b=c` replaces a value: the key is a path of keys and, in
lists, of numbers from 0 (`--set rewards.0.weight=2`); the value is YAML, so that a whole section can be given
(`--set 'data.train={name: file, path: train.jsonl}'`). `1e-5` is a number. An unknown key, a key given twice, a value
of another type and parts that contradict each other are errors, and nothing starts. `logitless train RECIPE --dry-run`
checks all of it with data, tokenizer and the model's shape, and prints steps and memory by part.

A relative path in a recipe starts at the folder of its file, in `--set` at the current folder. Where a hub name may
stand too (`model.source`, `model.tokenizer`, `dataset`), a value is a path if it begins with `.`, `/` or `~`, or if a
folder or a GGUF file has that name. `output` alone, which is written and not read, starts at the current folder in
both.

A recipe says nothing of processes: `torchrun --nproc-per-node N -m logitless train RECIPE` trains it on N of them.

Where a part has variants, its `name` says which one, and only that variant's keys are allowed.
"""


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a section.

    Args:
        name: as in the file.
        annotation: its type.
        default: as YAML, or "required".
        description: what it means; Markdown.
    """

    name: str
    annotation: Any
    default: str
    description: str


def page() -> str:
    """The text of the page.

    Example:
        >>> page().splitlines()[0]
        '# Configuration'
    """
    places: dict[tuple[type, ...], str] = {(Recipe,): ""}
    _place(Recipe, "", places)
    parts = [INTRODUCTION]
    first = {path: kinds for kinds, path in reversed(places.items())}
    for kinds, path in places.items():
        if first[path] is not kinds:
            continue  # some of the variants that stand there
        parts.append(f"## `{path}`\n" if path else "## The file\n")
        if len(kinds) == 1:
            parts.append(f"{_summary(kinds[0])}\n")
            parts.append(_table(kinds[0], places))
        else:
            for kind in kinds:
                parts.append(f"### {' or '.join(_marks(kind))}\n\n{_summary(kind)}\n")
                parts.append(_table(kind, places))
        if path == "algorithm":
            parts.append(_presets())
    return "\n".join(parts)


def keys(kind: type) -> list[Key]:
    """The keys of a section, its ``name`` left out.

    Example:
        >>> from logitless.train.config import ValueHeadSection
        >>> [key.name for key in keys(ValueHeadSection)]
        ['learning_rate_factor', 'source']
    """
    return [key for key in _all_keys(kind) if not _is_mark(key)]


def _all_keys(kind: type) -> Iterator[Key]:
    if issubclass(kind, BaseModel):
        for name, info in kind.model_fields.items():
            default = "required" if info.is_required() else _yaml(info.get_default(call_default_factory=True))  # type: ignore[call-arg]
            annotation = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
            yield Key(name, annotation, default, _markdown(info.description or _subject(info.annotation)))
        return
    assert dataclasses.is_dataclass(kind)
    hints = get_type_hints(kind, include_extras=True)
    described = _arguments(kind)
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        if field.default is not dataclasses.MISSING:
            default = _yaml(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            default = _yaml(field.default_factory())
        else:
            default = "required"
        yield Key(field.name, hints[field.name], default, described.get(field.name, ""))


def _is_mark(key: Key) -> bool:
    """Whether the key only tells variants apart."""
    return key.name in ("name", "placement") and get_origin(key.annotation) is Literal


def _place(kind: type, path: str, places: dict[tuple[type, ...], str]) -> None:
    """Give each section below ``kind``, and each set of variants, the path where it is used first."""
    for key in keys(kind):
        inner = _structures(key.annotation)
        if not inner or inner in places:
            continue
        wider = next((where for kinds, where in places.items() if set(inner) < set(kinds)), None)
        if wider is not None:
            places[inner] = wider
            continue
        star = ".NAME" if any(map(_is_mapping, _flat(key.annotation))) else ""
        places[inner] = (f"{path}.{key.name}" if path else key.name) + star
        for each in inner:
            _place(each, places[inner], places)


def _structures(annotation: Any) -> tuple[type, ...]:
    """The sections or dataclasses that a value of this type may be."""
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation)):
        return (annotation,)
    if get_origin(annotation) is Annotated:
        return _structures(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType, tuple):
        return tuple(kind for inner in get_args(annotation) for kind in _structures(inner))
    if _is_mapping(annotation):
        return _structures(get_args(annotation)[1])
    return ()


def _is_mapping(annotation: Any) -> bool:
    origin = get_origin(annotation)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _marks(kind: type) -> list[str]:
    """The key that tells this variant from the others, with each value that stands for it."""
    return [f"`{key.name}: {value}`" for key in _all_keys(kind) if _is_mark(key) for value in get_args(key.annotation)]


def _table(kind: type, places: Mapping[tuple[type, ...], str]) -> str:
    rows = [
        f"| `{key.name}` | {_cell(_type(key.annotation, places))} | {_default(key)} | {_cell(key.description)} |"
        for key in keys(kind)
    ]
    if not rows:
        return "No keys of its own.\n"
    return "\n".join(["| Key | Type | Default | What it is |", "|---|---|---|---|", *rows]) + "\n"


def _type(annotation: Any, places: Mapping[tuple[type, ...], str]) -> str:
    """A type in words; sections are links to where they stand."""
    kinds = _structures(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if kinds:
        alternatives = _flat(annotation)
        several = "list of " if any(get_origin(each) is tuple for each in alternatives) else ""
        several = "mapping of names to " if any(map(_is_mapping, alternatives)) else several
        others = [_type(each, places) for each in alternatives if not _structures(each)]
        return " or ".join([f"{several}[{places[kinds]}](#{places[kinds].replace('.', '').lower()})", *others])
    if origin is Annotated:
        return " ".join([_type(arguments[0], places), *(text for text in map(_bound, arguments[1:]) if text)])
    if origin in (Union, types.UnionType):
        return " or ".join(_type(inner, places) for inner in arguments)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return f"list of {_type(arguments[0], places)}"
        return "[" + ", ".join(_type(inner, places) for inner in arguments) + "]"
    if _is_mapping(annotation):
        return "mapping"
    return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


_WORDS: Mapping[Any, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    type(None): "null",
    Path: "path",
    Any: "anything",
}


def _flat(annotation: Any) -> Sequence[Any]:
    """The alternatives of a type."""
    if get_origin(annotation) is Annotated:
        return _flat(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [each for inner in get_args(annotation) for each in _flat(inner)]
    return [annotation]


def _bound(metadata: Any) -> str:
    for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤")):
        if (value := getattr(metadata, name, None)) is not None:
            return f"{sign} {value}"
    pattern = getattr(metadata, "pattern", None)
    return f"matching `{pattern}`" if pattern else ""


def _default(key: Key) -> str:
    return key.default if key.default in ("required", "its defaults") else f"`{key.default}`"


def _yaml(value: Any) -> str:
    """A default as it would stand in a recipe."""
    if isinstance(value, BaseModel) or dataclasses.is_dataclass(value):
        return "its defaults"
    plain = list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()


def _summary(kind: Any) -> str:
    """The docstring's first paragraph, and the equation below it where there is one.

    Where it only names a function of its module, the function's own summary stands in its place.
    """
    text = inspect.getdoc(kind) or ""
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    shown = paragraphs[:1] + [each for each in paragraphs[1:2] if each.startswith("``")]
    named = re.fullmatch(r"(?:See )?``(\w+)``[.;]? ?(.*)", shown[0])
    function = getattr(sys.modules[kind.__module__], named[1], None) if named else None
    if named and inspect.isfunction(function):
        return "\n\n".join(filter(None, [_summary(function), _markdown(named[2][:1].upper() + named[2][1:])]))
    return "\n\n".join(_markdown(each) for each in shown)


def _subject(annotation: Any) -> str:
    """What the one section that may stand here is for."""
    kinds = _structures(annotation)
    return _summary(kinds[0]).split(".")[0] if len(kinds) == 1 else ""


def _arguments(kind: type) -> dict[str, str]:
    """What the docstrings of a class and its bases say of their arguments; the class's own word counts most."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        match = re.search(r"^Args:\n((?:(?: +.*)?\n?)*)", inspect.cleandoc(each.__dict__.get("__doc__") or ""), re.M)
        for entry in re.split(r"\n(?=    \S)", match[1]) if match else []:
            names, colon, text = entry.strip().partition(": ")
            if not colon:
                continue
            text = " ".join(text.split())
            for name in (each.strip() for each in names.split(",")):
                other = re.fullmatch(r"as (?:for|in) ``(\w+)``\.?", text)
                if other:
                    found[name] = _arguments(getattr(sys.modules[each.__module__], other[1]))[name]
                else:
                    found[name] = _markdown(text if ". " in text else text.removesuffix("."))
    return found


def _markdown(text: str) -> str:
    """The text in Markdown, in the words of a recipe."""
    return re.sub(r"\bNone\b", "null", text.replace("``", "`"))


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", text) or "–"


def _presets() -> str:
    rows = ["### Presets\n", "| `preset` | `parameters` and their defaults | What it is |", "|---|---|---|"]
    for name, preset in PRESETS.items():
        parameters = inspect.signature(preset).parameters.values()
        given = ", ".join(f"`{p.name}: {_yaml(p.default)}`" if p.default is not p.empty else p.name for p in parameters)
        rows.append(f"| `{name}` | {given or '–'} | {_cell(_summary(preset))} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    """Write the pages on recipes, metrics and rollouts, or with ``--check`` say whether they are current."""
    texts = ((PAGE, page), (METRICS_PAGE, metrics_page), (ROLLOUTS_PAGE, rollout_data.page))
    return pages.main("logitless.train.document", *(pages.text_page(path, text) for path, text in texts))


if __name__ == "__main__":
    sys.exit(main())
