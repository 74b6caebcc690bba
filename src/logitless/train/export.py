"""Export a policy as a folder that other programs read: weights, tokenizer, generation settings and a model card.

Float32 master weights are rounded once to the dtype asked for; an adapter is merged into its base in float32 before.
A value head is not exported.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import nn
from transformers import GenerationConfig

from logitless.errors import ConfigurationError
from logitless.models.export import merged_tensors
from logitless.models.lm_head import causal_lm
from logitless.models.lora import save_adapters
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.loading import CODE, NAMES_OR_PATHS, PATHS, places
from logitless.train.record.run_folder import RunFolder
from logitless.train.report.plots import Line, line_plot
from logitless.train.saved_policy import SavedPolicy
from logitless.train.store.atomic import write_folder_atomically

Form = Literal["merged", "adapter"]

_CARD_METRICS = {
    "reward/mean": "mean reward",
    "evaluation/accuracy": "held-out accuracy",
    "evaluation/reward_mean": "held-out reward",
    "length/mean": "mean length, tokens",
}
_CARD_ROWS = 12


def check_form(recipe: Recipe, form: Form, *, has_warm_start: bool) -> None:
    """Refuse an export that no program could load.

    Raises:
        ConfigurationError: an adapter where none was trained, or whose base model exists in this run folder alone.
    """
    section = recipe.model
    if form == "merged":
        return
    if section.lora is None:
        raise ConfigurationError(
            needed="a run with model.lora to export its adapter",
            given="full fine-tuning",
            remedy="Export it merged, which is the whole model.",
        )
    if has_warm_start or section.random_weights:
        raise ConfigurationError(
            needed="an adapter of a base model that others have",
            given="a base that a warm start has changed" if has_warm_start else "a base of random weights",
            remedy="Export it merged.",
        )


def check_target(target: Path) -> None:
    """Refuse a target that exists.

    Raises:
        ConfigurationError: there is a file or folder at ``target``.
    """
    if target.exists():
        raise ConfigurationError(
            needed=f"nothing at {target}", given="a file or folder", remedy="Remove it, or name another folder."
        )


def export_policy(saved: SavedPolicy, folder: RunFolder, target: Path, *, form: Form, dtype: torch.dtype) -> None:
    """Write the folder, atomically. The policy is changed and cannot be used afterwards.

    Args:
        saved: of ``load_policy`` with ``exact=True``.
        form: ``merged`` is the whole model for ``from_pretrained``, ``adapter`` PEFT's files alone.

    Raises:
        ConfigurationError: ``target`` exists, or the run has no such form.
        TrainingError: the disk is full or not writable.
    """
    check_form(saved.recipe, form, has_warm_start=folder.warm_start.is_dir())
    check_target(target)
    generation = generation_config(saved)
    card = model_card(saved, folder, form=form, dtype=dtype)
    curves = _curves(folder, saved.step)

    def write(path: Path) -> None:
        model = saved.policy.model
        if form == "adapter":
            _replace_weights(model, {name: p.to(dtype) for name, p in model.named_parameters() if p.requires_grad})
            save_adapters(model, path)
        else:
            plain = _merged(model, dtype)
            plain.generation_config = generation  # type: ignore[assignment]
            plain.save_pretrained(str(path))  # type: ignore[operator]
        generation.save_pretrained(str(path))
        saved.tokenizer.save_pretrained(str(path))
        (path / "README.md").write_text(card, encoding="utf-8")
        for name, svg in curves.items():
            (path / f"{name}.svg").write_text(svg, encoding="utf-8")

    write_folder_atomically(target, write)


def generation_config(saved: SavedPolicy) -> GenerationConfig:
    """The sampling settings of the run as transformers' ``GenerationConfig``."""
    sampling = saved.recipe.rollout.sampling
    own: Any = getattr(causal_lm(saved.policy.model), "generation_config", None)
    ends = [own.eos_token_id] if own is not None and isinstance(own.eos_token_id, int) else (own and own.eos_token_id)
    eos = [] if sampling.ignore_eos else [saved.tokenizer.eos_token_id, *(ends or [])]
    distinct = list(dict.fromkeys([*eos, *sampling.stop_token_ids]))
    padding = saved.tokenizer.pad_token_id
    return GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or 0,
        min_p=sampling.min_p or None,
        repetition_penalty=sampling.repetition_penalty,
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens or None,
        bos_token_id=saved.tokenizer.bos_token_id,
        eos_token_id=distinct[0] if len(distinct) == 1 else distinct or None,
        pad_token_id=saved.tokenizer.eos_token_id if padding is None else padding,
    )


def model_card(saved: SavedPolicy, folder: RunFolder, *, form: Form, dtype: torch.dtype) -> str:
    """The model card in Markdown: base model, recipe, commit, versions and metrics.

    Of local paths only the last part is shown.
    """
    recipe = saved.recipe
    source, base = recipe.model.source, None
    if isinstance(source, str):
        base = Path(source).name if source.startswith("/") else source
    begun = f"from {base}" if isinstance(source, str) else f"from a {source.get('model_type', 'model')} config"
    front: dict[str, Any] = {"library_name": "peft" if form == "adapter" else "transformers", "tags": ["logitless"]}
    if base is not None and not recipe.model.random_weights:
        front["base_model"] = base
    what = "An adapter" if form == "adapter" else "A model"
    begun += " with random weights" if recipe.model.random_weights else ""
    learnt = "a LoRA adapter" if recipe.model.lora is not None else "every weight"
    lines = [
        *("---", yaml.safe_dump(front, sort_keys=False).strip(), "---", "", f"# {recipe.name}", ""),
        f"{what} trained with logitless by reinforcement learning"
        f" (`{recipe.algorithm.preset}`), {begun}: {learnt}, {saved.block} blocks, {saved.step} optimizer steps.",
        f"Weights in {str(dtype).removeprefix('torch.')}, from `{saved.source.name}` of the run.",
        *("", "## Made with", "", *_made_with(folder), "", "## Numbers", "", *_numbers(folder, saved.step)),
        *(f"\n![{name.replace('_', ' ')}]({name}.svg)" for name in _curves(folder, saved.step)),
        *("", "## Recipe", "", "```yaml", _shown_recipe(recipe).strip(), "```", ""),
    ]
    return "\n".join(lines)


def _merged(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model without adapters, whose weights include them, in the dtype."""
    weights = dict(merged_tensors(model, dtype=dtype))
    plain: nn.Module = model.unload() if hasattr(model, "peft_config") else model  # type: ignore[operator]
    _replace_weights(plain, weights)
    return plain


def _replace_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if name in weights:
            parameter.requires_grad_(False)
            parameter.data = weights[name].detach()


def _made_with(folder: RunFolder) -> list[str]:
    """Commit, device and versions of the run's last start."""
    try:
        last = json.loads(folder.provenance.read_bytes())["starts"][-1]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return ["The run folder does not say (`provenance.json` is missing or damaged)."]
    packages = ", ".join(f"{name} {version}" for name, version in last.get("packages", {}).items())
    return [
        f"- commit: {last.get('commit') or 'started outside of a repository'}",
        f"- device: {last.get('device')}",
        f"- Python {last.get('python')}; {packages}",
    ]


def _numbers(folder: RunFolder, step: int) -> list[str]:
    """A table of metrics up to the step: a row an evaluation, or a row a block where there was none."""
    known: dict[str, float] = {}
    evaluated, blocks = [], []
    for record in folder.read_metrics():
        if record["step"] > step:
            break
        known |= {name: record[name] for name in _CARD_METRICS if record.get(name) is not None}
        if record.get("evaluation/accuracy") is not None:
            evaluated.append({"step": record["step"], **known})
        elif record.get("reward/mean") is not None:
            blocks.append({"step": record["step"], **known})
    told = evaluated or blocks
    if not told:
        return ["The run has no metrics."]
    evenly = {round(i * (len(told) - 1) / (_CARD_ROWS - 1)) for i in range(_CARD_ROWS)}
    names = [name for name in _CARD_METRICS if name in known]
    rows = [
        [f"{line['step']:.0f}", *(f"{line[name]:.4g}" if name in line else "" for name in names)]
        for line in (told[index] for index in sorted(evenly))
    ]
    head = ["step", *(_CARD_METRICS[name] for name in names)]
    return [f"| {' | '.join(row)} |" for row in (head, ["---:"] * len(head), *rows)]


def _curves(folder: RunFolder, step: int) -> dict[str, str]:
    """SVG learning curves up to the step, by file name: reward, and held-out accuracy where there is one."""
    records = [record for record in folder.read_metrics() if record["step"] <= step]
    found = {}
    for name, metric, smooth in (("reward", "reward/mean", True), ("held_out_accuracy", "evaluation/accuracy", False)):
        points = [(record["step"], record[metric]) for record in records if record.get(metric) is not None]
        if len(points) > 1:
            line = Line(name, tuple(x for x, _ in points), tuple(y for _, y in points))
            label = name.replace("_", " ")
            found[name] = line_plot([line], x_label="optimizer step", y_label=label, smooth=smooth)
    return found


def _shown_recipe(recipe: Recipe) -> str:
    """The recipe without local folders and without the accounts of its writers."""
    shown = recipe.model_dump(mode="json", exclude={"output", "writers"})
    for key in (*PATHS, *NAMES_OR_PATHS, *CODE):
        for _, at, last in places(shown, key):
            if isinstance(at[last], str) and at[last].startswith("/"):
                at[last] = Path(at[last]).name
    return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
