"""Which dtype ``auto`` is on this machine; settled once, when a recipe is read.

On a GPU that computes in bfloat16 it is bfloat16, whatever dtype the checkpoint has: float32 master weights keep every
bit of the checkpoint, float16 has too few exponents for gradients, and row-invariant layers and the GPU engine need 16
bits. Anywhere else it is float32. docs/numerics.md compares held-out results of both.
"""

import torch

from logitless.installed import too_old
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.model import ModelSection


def automatic_dtype(section: ModelSection, *, plans_for_gpus: bool = False) -> tuple[str, str]:
    """The dtype that ``model.trained_dtype: auto`` stands for, and why, in words.

    Args:
        plans_for_gpus: take ``device: auto`` for a GPU where this machine has none.

    Example:
        >>> automatic_dtype(ModelSection(source="x/y", device="cpu"))
        ('float32', 'a model on the CPU')
    """
    if section.autocast is not None:
        return "float32", f"model.autocast: {section.autocast} lowers the products"
    kind, _, index = section.device.partition(":")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cpu" or (kind == "auto" and not there and not plans_for_gpus):
        return "float32", "a model on the CPU"
    if not there:  # a GPU elsewhere is planned for
        return "bfloat16", "GPUs since Ampere compute in it"
    device = torch.device("cuda", min(int(index), there - 1) if index.isdigit() else torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    if too_old(device):
        return "float32", f"{name} does not compute in bfloat16"
    return "bfloat16", f"{name} computes in it"


def resolved_dtypes(recipe: Recipe, *, plans_for_gpus: bool) -> dict[str, str]:
    """The keys of ``model`` that are ``auto``, each with its dtype on this machine.

    An adapter is bfloat16 only on a base in bfloat16. With full fine-tuning the reference has the policy's dtype, so
    that both start with bitwise identical log-probs; it is float32 on a CPU, and where there is no reference.

    Args:
        plans_for_gpus: of ``automatic_dtype``.
    """
    model = recipe.model
    automatic, _ = automatic_dtype(model, plans_for_gpus=plans_for_gpus)
    trained, frozen = str(model.trained_dtype), str(model.dtype)
    if model.lora is not None:
        frozen = automatic if frozen == "auto" else frozen
        trained = (automatic if frozen == "bfloat16" else "float32") if trained == "auto" else trained
    else:
        trained = automatic if trained == "auto" else trained
        with_policy = recipe.reads_reference and automatic != "float32"
        frozen = (trained if with_policy else "float32") if frozen == "auto" else frozen
    found = {"trained_dtype": trained, "dtype": frozen}
    return {key: dtype for key, dtype in found.items() if getattr(model, key) == "auto"}


def dtype_line(section: ModelSection) -> str:
    """What is in force, and whether it is what ``auto`` is here; for the first lines of a run and of ``--dry-run``.

    Example:
        >>> dtype_line(ModelSection(source="x/y", device="cpu", dtype="float32", trained_dtype="float32"))
        'dtype float32: auto, for a model on the CPU'
        >>> section = ModelSection(source="x/y", device="cpu", dtype="float32", trained_dtype="bfloat16")
        >>> dtype_line(section)
        'dtype bfloat16, with float32 masters: set by the recipe; auto is float32 here, for a model on the CPU'
    """
    lowered = section.trained_dtype != "float32"
    held = section.trained_dtype + (", with float32 masters" if lowered else "")
    if section.lora is not None:
        held += f", on a base in {section.quantize or section.dtype}"
    automatic, reason = automatic_dtype(section)
    base = section.trained_dtype if section.lora is None or section.quantize else section.dtype
    if {section.trained_dtype, base} == {automatic}:
        return f"dtype {held}: auto, for {reason}"
    return f"dtype {held}: set by the recipe; auto is {automatic} here, for {reason}"
