"""A block in training as a checkpoint stores it: tensors by name, and the rest as JSON.

Both directions follow the fields of the dataclasses: a new field with a default needs no change here.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from torch import Tensor

from logitless.train.block import ScoredBlock

_PREFIX = "block"
_Stage = TypeVar("_Stage")


def stored_block(block: ScoredBlock) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a block as ``block/<field>/...``, and its other values by the same names."""
    values = _flat(block, _PREFIX)
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in values.items() if name not in tensors}


def load_block(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> ScoredBlock:
    """The block that ``stored_block`` took apart.

    Raises:
        KeyError: a value is missing, or another version's.
    """
    of_block = {name: tensors[name] for name in tensors if name.startswith(f"{_PREFIX}/")}
    values = {**of_block, **tuples(state)}
    block = _built(ScoredBlock, _PREFIX, values)
    if unknown := sorted(values.keys() - _flat(block, _PREFIX).keys()):
        raise KeyError(f"{unknown[0]}, which is of another version")
    return block


def _flat(stage: Any, prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for f in fields(stage):
        value = getattr(stage, f.name)
        flat |= _flat(value, f"{prefix}/{f.name}") if is_dataclass(value) else {f"{prefix}/{f.name}": value}
    return flat


def _built(kind: type[_Stage], prefix: str, values: Mapping[str, Any]) -> _Stage:
    hints = get_type_hints(kind)
    given = {}
    for f in fields(kind):  # type: ignore[arg-type]
        name, choices = f"{prefix}/{f.name}", get_args(hints[f.name]) or (hints[f.name],)
        stage = next((each for each in choices if isinstance(each, type) and is_dataclass(each)), None)
        if name in values:
            given[f.name] = values[name]
        elif stage is not None and any(each.startswith(f"{name}/") for each in values):
            given[f.name] = _built(stage, name, values)
        elif f.default is MISSING:  # a version before this one had no such field
            raise KeyError(name)
    return kind(**given)


def tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields from JSON, with tuples in place of lists at every depth.

    Example:
        >>> tuples({"kept": [True, [1]]})
        {'kept': (True, (1,))}
    """

    def read(value: Any) -> Any:
        return tuple(map(read, value)) if isinstance(value, list) else value

    return {name: read(value) for name, value in fields.items()}
