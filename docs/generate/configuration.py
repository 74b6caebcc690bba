"""The keys of ``docs/configuration.md``, from the types of a recipe.

Keys, types and defaults are read from the types, descriptions from pydantic's fields and from the ``Args`` of dataclass
docstrings.
"""

import dataclasses
import inspect
import re
import sys
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel

from docs.generate import linked
from logitless.objective.advantage import Advantage
from logitless.objective.surrogate import Surrogate
from logitless.train.assembly.checks import BUILT_RULES
from logitless.train.assembly.layers import AUTO_LAYER_RULES, LAYER_RULES
from logitless.train.assembly.resolve import GPU_RULES
from logitless.train.recipe.algorithm import COMPOSED_RULES
from logitless.train.recipe.config import MACHINE_RULES, PROCESS_RULES, RULES, Recipe
from logitless.train.recipe.rule import Rule

RULES_INTRODUCTION = """## What goes with what

What each setting needs. Without it a run is refused, and the error says what to do. `auto` does not choose such a
setting and says why; `logitless doctor` proposes settings that need less.

"""


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a section.

    Args:
        name: as in the file.
        annotation: its type.
        default: as YAML, or "no default": the key is required.
        description: what it means; Markdown.
    """

    name: str
    annotation: Any
    default: str
    description: str

    @property
    def meaning(self) -> str:
        """All but the default; equal for keys that variants share."""
        return f"{self.name} {self.annotation} {self.description}"


def page(text: str) -> str:
    """The page with its sections of keys, which are its end."""
    return text.partition(FIRST)[0] + sections()


FIRST = "## The file\n"


def sections() -> str:
    """Every section of a recipe, and what goes with what.

    Example:
        >>> sections().splitlines()[0]
        '## The file'
    """
    places: dict[tuple[type, ...], str] = {(Recipe,): ""}
    _place(Recipe, "", places)
    parts = []
    first = {path: kinds for kinds, path in reversed(places.items())}
    told: dict[str, list[Key]] = {}
    for kinds, path in places.items():
        if first[path] is not kinds:
            continue  # a part of the variants that are listed there
        parts.append(f"## `{path}`\n" if path else FIRST)
        if len(kinds) == 1:
            its = keys(kinds[0])
            parts.append(f"{_summary(kinds[0], equation=False)}\n")
            for where, others in told.items():
                if len(again := [key for key in its if key in others]) > 1:
                    parts.append(f"As in {_link(where)}: {', '.join(map(_given, again))}.\n")
                    its = [key for key in its if key not in again]
            parts.append(_list(its, places))
            told[path] = its
        else:
            parts += _variants(kinds, places, equations=not path.startswith("algorithm."))  # these: docs/objectives.md
    return "\n".join(filter(None, [*parts, _rules()]))


def _rules() -> str:
    """What each setting needs: other settings, processes, the machine, the model; in the order of the file."""
    rules: list[Rule[Any]] = [*RULES, *COMPOSED_RULES, *BUILT_RULES, *PROCESS_RULES, *MACHINE_RULES]
    needs: dict[str, list[str]] = {}
    for rule in (*rules, *LAYER_RULES, *AUTO_LAYER_RULES, *GPU_RULES):
        said = needs.setdefault(rule.setting.words, [])
        said += [rule.needed] * (rule.needed not in said)
    alike: dict[str, list[str]] = {}
    for words, said in needs.items():
        alike.setdefault(_markdown(_without_reasons(said)), []).append(f"`{words}`")
    return RULES_INTRODUCTION + "".join(f"- {', '.join(settings)}: {said}\n" for said, settings in alike.items())


def _without_reasons(said: Sequence[str]) -> str:
    """Needs without their reasons, which errors give."""
    return "; ".join(re.split(r", (?:for|which|whose|through which|to which) ", each)[0] for each in said)


def _variants(kinds: Sequence[type], places: Mapping[tuple[type, ...], str], *, equations: bool) -> list[str]:
    """The keys that variants share, then each variant; without ``equations`` those without keys of their own are named.

    Args:
        equations: whether a variant's equation stands here, not in docs/objectives.md, which describes surrogates and
            advantages.
    """
    of = {kind: keys(kind) for kind in kinds}
    counts = Counter(key.meaning for each in of.values() for key in each)
    common = {meaning for meaning, count in counts.items() if count > 1}
    lacking = {meaning: [kind for kind in kinds if meaning not in _meanings(of[kind])] for meaning in common}
    parts: list[str] = []
    usual: dict[str, str] = {}
    for without in ([], *([kind] for kind in kinds)):
        shared = _common(of, {meaning for meaning in common if lacking[meaning] == without})
        usual |= {key.meaning: key.default for key in shared}
        if shared:
            who = " ".join(["Every variant", *(f"but {_mark(kind)}" for kind in without)])
            parts += [f"{who} has:\n", _list(shared, places)]
    if some := _common(of, common - usual.keys()):
        parts += ["Variants that name them below have:\n", _list(some, places)]
    elsewhere = {*get_args(Surrogate), *get_args(Advantage)}
    plain = [] if equations else [kind for kind, its in of.items() if _meanings(its) <= usual.keys()]
    if plain:
        names = ", ".join(_mark(kind).replace("name: ", "") for kind in plain)
        parts.append(f"[Equations](objectives.md). Without more keys: {names}.\n")
    for kind, its in of.items():
        if kind in plain:
            continue
        also = [key for key in its if key.meaning in common and usual.get(key.meaning) != key.default]
        said = "" if kind in elsewhere else f"\n{_summary(kind, equation=equations)}\n"
        parts.append(f"### {_mark(kind)}\n{said}")
        if also:
            parts.append(f"Also {', '.join(map(_given, also))}.\n")
        parts.append(_list([key for key in its if key.meaning not in common], places))
    return parts


def _meanings(its: Sequence[Key]) -> set[str]:
    return {key.meaning for key in its}


def _common(of: Mapping[type, Sequence[Key]], chosen: Set[str]) -> list[Key]:
    """Each key with one of these meanings once, with its most common default."""
    found: dict[str, list[Key]] = {}
    for key in (key for its in of.values() for key in its):
        if key.meaning in chosen:
            found.setdefault(key.meaning, []).append(key)
    usual = {meaning: Counter(key.default for key in its).most_common(1)[0][0] for meaning, its in found.items()}
    return [dataclasses.replace(its[0], default=usual[meaning]) for meaning, its in found.items()]


def keys(kind: type) -> list[Key]:
    """The keys of a section, its ``name`` left out.

    Example:
        >>> from logitless.train.recipe.algorithm import ValueHeadSection
        >>> [key.name for key in keys(ValueHeadSection)]
        ['learning_rate_factor', 'source']
    """
    return [key for key in _all_keys(kind) if not _is_mark(key)]


def _all_keys(kind: type) -> Iterator[Key]:
    if issubclass(kind, BaseModel):
        for name, info in kind.model_fields.items():
            default = "no default" if info.is_required() else _yaml(info.get_default(call_default_factory=True))  # type: ignore[call-arg]
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
            default = "no default"
        yield Key(field.name, hints[field.name], default, described.get(field.name, ""))


def _is_mark(key: Key) -> bool:
    """Whether the key only tells variants apart."""
    return key.name in ("name", "placement") and get_origin(key.annotation) is Literal


def _place(kind: type, path: str, places: dict[tuple[type, ...], str]) -> None:
    """Record for each section below ``kind``, and each set of variants, the path where it is used first."""
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


def _mark(kind: type) -> str:
    """The key that tells this variant from the others, with each value that stands for it."""
    marks = [f"`{key.name}: {value}`" for key in _all_keys(kind) if _is_mark(key) for value in get_args(key.annotation)]
    return " or ".join(marks)


def _list(its: Sequence[Key], places: Mapping[tuple[type, ...], str]) -> str:
    """One line a key; neighbours with the same description share a line."""
    told = groupby(its, lambda key: f"{_kind(key, places)}{_said(key)}\n")
    return "".join(f"- {', '.join(map(_given, alike))}{description}" for description, alike in told)


def _said(key: Key) -> str:
    """The key's description, unless it is that of the section that it links to."""
    return "" if key.description == _subject(key.annotation) != "" else f": {key.description or _UNDESCRIBED}"


_UNDESCRIBED = "\u2013"
_LONGEST = 60
"""Characters of a default that is shown; the judge's question has a page of them."""


def _given(key: Key) -> str:
    """The key as in a recipe, with its default if that is a value."""
    if key.default in _NO_VALUE:
        return f"`{key.name}`"
    default = " ".join(key.default.split())
    return f"`{key.name}: {default if len(default) <= _LONGEST else default[:_LONGEST] + '...'}`"


_NO_VALUE = ("no default", "its defaults")


def _kind(key: Key, places: Mapping[tuple[type, ...], str]) -> str:
    """In parentheses the type, if the default does not show it, and whether the key is required."""
    bare, *bounds = get_args(key.annotation) if get_origin(key.annotation) is Annotated else (key.annotation,)
    if bare in (bool, int, float, str) and key.default not in _NO_VALUE:
        words = " ".join(filter(None, map(_bound, bounds)))
    elif _are_described(key):
        words = ""
    else:
        words = _type(key.annotation, places)
    if key.default == "null":
        words = words.removesuffix(" or null")
    said = ", ".join(filter(None, [words, "required" * (key.default == "no default")]))
    return f" ({said})" if said else ""


def _type(annotation: Any, places: Mapping[tuple[type, ...], str]) -> str:
    """A type in words; sections are links."""
    kinds = _structures(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if kinds:
        alternatives = _flat(annotation)
        several = "list of " if any(get_origin(each) is tuple for each in alternatives) else ""
        several = "mapping of names to " if any(map(_is_mapping, alternatives)) else several
        others = [_type(each, places) for each in alternatives if not _structures(each)]
        return " or ".join([f"{several}{_link(places[kinds])}", *others])
    if origin is Annotated:
        return " ".join([_type(arguments[0], places), *(text for text in map(_bound, arguments[1:]) if text)])
    if origin in (Union, types.UnionType):
        return " or ".join(_type(inner, places) for inner in arguments)
    if origin is Literal:
        return _or([f"`{value}`" for value in arguments])
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return f"list of {_type(arguments[0], places)}"
        return "[" + ", ".join(_type(inner, places) for inner in arguments) + "]"
    if _is_mapping(annotation):
        return "mapping"
    return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _link(path: str) -> str:
    return f"[{path}](#{path.replace('.', '').lower()})"


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
        if (value := getattr(metadata, name, None)) is not None and (sign, value) != (
            ">",
            0,
        ):  # that goes without saying
            return f"{sign} {value}"
    pattern = getattr(metadata, "pattern", None)
    return f"matching `{pattern}`" if pattern else ""


def _are_described(key: Key) -> bool:
    """Whether the value is one of a few words that the description names all."""
    alternatives = [each for each in _flat(key.annotation) if each is not type(None)]
    values = [value for each in alternatives for value in (get_args(each) if get_origin(each) is Literal else [""])]
    named = re.findall(r"[\w-]+", f"{key.default} {key.description}")
    return all(str(value) in named for value in values)


def _or(words: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _yaml(value: Any) -> str:
    """A default as YAML."""
    if isinstance(value, BaseModel) or dataclasses.is_dataclass(value):
        return "its defaults"
    plain = list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()


def _summary(kind: Any, *, equation: bool = True) -> str:
    """The docstring's first paragraph and, if wanted, the equation below it.

    If the paragraph only names a function of its module, the function's summary is taken instead.
    """
    text = inspect.getdoc(kind) or ""
    first, *others = [" ".join(part.split()) for part in text.split("\n\n")]
    named = re.fullmatch(r"(?:See )?``(\w+)``[.;]? ?(.*)", first)
    function = getattr(sys.modules[kind.__module__], named[1], None) if named else None
    if named and inspect.isfunction(function):
        told, rest = _summary(function, equation=equation), _markdown(named[2])
        if rest.startswith((",", "(")):
            return told.removesuffix(".") + " " * rest.startswith("(") + rest
        return "\n\n".join(filter(None, [told, rest[:1].upper() + rest[1:]]))
    shown = [first, *(each for each in others[:1] if equation and each.startswith("``"))]
    return "\n\n".join(_markdown(each) for each in shown)


def _subject(annotation: Any) -> str:
    """The summary of the section that a value of this type is, if there is just one."""
    kinds = _structures(annotation)
    return _summary(kinds[0]).split(". ")[0].removesuffix(".") if len(kinds) == 1 else ""


def _arguments(kind: type) -> dict[str, str]:
    """Descriptions of arguments from the docstrings of a class and its bases; those of the class come first."""
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
    return re.sub(r"\bNone\b", "null", linked(text).replace("``", "`"))
