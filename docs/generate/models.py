"""The tables of ``docs/models.md``, from the list of architectures that tests go through."""

from collections.abc import Sequence

from docs.generate import renewed
from tests.models.families import FAMILIES, IMAGE_MODELS, Family

END = "<!-- end -->"


def page(text: str) -> str:
    """The page with both tables."""
    text = renewed(text, "<!-- architectures -->\n", _language_models(), END)
    return renewed(text, "<!-- image models -->\n", _image_models(), END)


def _language_models() -> str:
    """A line for all architectures of the same kind."""
    head = ("Models", "Beside plain attention", "Trains, packs, shares prompts, LoRA", "GPU engine, vLLM")
    alike: dict[tuple[str, ...], list[str]] = {}
    for each in FAMILIES:
        alike.setdefault((each.parts, *_cells(each)), []).append(f"{each.models} (`{each.model_type}`)")
    return _table(head, [("; ".join(names), *cells) for cells, names in alike.items()])


def _cells(family: Family) -> tuple[str, str]:
    if family.refused is not None:
        return "refused", ""
    trains = "yes" if family.attention == "packed" else f"`attention: {family.attention}`, no shared prompts"
    served = {"no": "neither"}.get(family.served, family.served)
    return trains, f"exact, {served}" if family.exact else served


def _image_models() -> str:
    becomes: dict[str, list[str]] = {}
    for each in IMAGE_MODELS:
        kind = "the same with `_text`" if each.becomes == f"{each.model_type}_text" else f"`{each.becomes}`"
        becomes.setdefault(kind, []).append(f"{each.models} (`{each.model_type}`)")
    return _table(("Models", "Loaded and exported as"), [("; ".join(names), kind) for kind, names in becomes.items()])


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"|{'|'.join(line)}|\n" for line in lines)
