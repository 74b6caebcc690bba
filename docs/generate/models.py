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
    head = (
        "Model",
        "`model_type`",
        "Beside plain attention",
        "Trains, packs, shares prompts, LoRA",
        "Exact, GPU engine",
    )
    rows = [(each.models, f"`{each.model_type}`", each.parts, *_cells(each)) for each in FAMILIES]
    return _table(head, rows)


def _cells(family: Family) -> tuple[str, str]:
    if family.refused is not None:
        return "refused", "no"
    return "yes", "yes" if family.exact else "no"


def _image_models() -> str:
    head = ("Model", "`model_type`", "Loaded and exported as")
    return _table(head, [(each.models, f"`{each.model_type}`", f"`{each.becomes}`") for each in IMAGE_MODELS])


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
