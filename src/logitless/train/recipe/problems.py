"""pydantic's errors in the words of a recipe: the key, what it needs, what was given, and the nearest known name."""

import dataclasses
import difflib
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from logitless.errors import ConfigurationError, LogitlessError
from logitless.rewards.user_function import Function
from logitless.train.recipe.config import Recipe

RENAMED = {
    "drop_router_loss": "router",
    "leave_out_dead": "skip_zero_advantage",
    "recount_every": "rescore_every",
    "spoiled_score": "ungradable_score",
}
"""Renamed keys, old to new."""

REMOVED = {
    ("rollout.engine", "vllm"): "vLLM no longer runs in the trainer's process; take {name: vllm_server}, or auto",
    ("rollout.engine.weights", "nccl"): "weights no longer go over NCCL; take {name: folder}",
    ("model.layers", "liger"): "Liger's layers are no longer used; take auto",
}
"""Removed values of keys: what is no longer so, and what to take instead."""

ELSEWHERE = {
    "adam_epsilon": "train.optimizer.eps",
    "batch_size": "train.tokens_per_step",
    "beta": "kl.control.beta",
    "bf16": "model.trained_dtype",
    "dataset_name": "data.train.dataset",
    "epsilon": "algorithm.parameters.epsilon",
    "epsilon_high": "algorithm.parameters.epsilon_high",
    "eval_steps": "evaluation.every_blocks",
    "generation_batch_size": "rollout.prompts_per_block",
    "gradient_accumulation_steps": "train.tokens_per_step",
    "importance_sampling_level": "algorithm.ratio",
    "learning_rate": "train.optimizer.learning_rate",
    "load_in_4bit": "model.quantize",
    "lr": "train.optimizer.learning_rate",
    "lora_alpha": "model.lora.alpha",
    "lora_r": "model.lora.rank",
    "lora_target_modules": "model.lora.targets",
    "loss_type": "algorithm.preset",
    "lr_scheduler_type": "train.optimizer.schedule",
    "mask_truncated_completions": "train.drop_truncated",
    "max_completion_length": "rollout.sampling.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": "train.blocks",
    "model_name_or_path": "model.source",
    "num_generations": "rollout.completions_per_prompt",
    "num_iterations": "train.epochs_per_block",
    "num_train_epochs": "train.blocks",
    "output_dir": "output",
    "per_device_train_batch_size": "train.tokens_per_micro_batch",
    "r": "model.lora.rank",
    "report_to": "writers",
    "reward_funcs": "rewards",
    "run_name": "name",
    "save_steps": "checkpoint.every_blocks",
    "save_total_limit": "checkpoint.keep",
    "scale_rewards": "algorithm.advantage",
    "steps_per_generation": "train.tokens_per_step",
    "temp": "rollout.sampling.temperature",
    "use_vllm": "rollout.engine",
    "warmup_ratio": "train.optimizer.warmup_steps",
}
"""Names of TRL, PEFT and PyTorch, each with the key that does the same here."""

_LIKE = 0.6
"""Similarity (difflib) from which a known name is suggested."""

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a text",
    "tuple": "a list",
    "list": "a list",
}
"""pydantic's types in words."""


def refusal_of(error: ValidationError) -> ConfigurationError:
    """All problems of a recipe as one error. A single problem that a part or a rule raised itself keeps its words."""
    details = error.errors()
    own = _own(details[0])
    if len(details) == 1 and own is not None:
        where = ".".join(_followed(details[0])[0])
        return ConfigurationError(
            needed=f"in {where}: {own.needed}" if where else own.needed, given=own.given, remedy=own.remedy
        )
    return ConfigurationError(
        needed="a valid recipe",
        given="; ".join(map(_problem, details)),
        remedy="See docs/configuration.md for every key.",
    )


def _own(details: ErrorDetails) -> LogitlessError | None:
    """The error that a part or a rule raised itself."""
    raised = details.get("ctx", {}).get("error")
    return raised if isinstance(raised, LogitlessError) else None


def _problem(details: ErrorDetails) -> str:
    path, beside, at = _followed(details)
    where, kind, given = ".".join(path) or "the recipe", details["type"], details["input"]
    if kind == "union_tag_invalid":
        given = details["ctx"]["tag"]
    if (gone := REMOVED.get((where, str(given)))) is not None:
        return f"{where}: not {given!r}: {gone}"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return _unknown(path, {name for each in beside for name in _fields(each)}, of_function=Function in beside)
    if kind == "missing":
        or_none = ", or [] where an environment pays" if where == "rewards" else ""
        return f"{where}: is needed and not there{or_none}"
    if (own := _own(details)) is not None:
        return f"{where}: {own}".removesuffix(".")
    needed, choices = _needed(details, at)
    if near := difflib.get_close_matches(str(given), choices, n=1, cutoff=_LIKE):
        return f"{where}: not {given!r} (nearest: {near[0]!r}): {needed}"  # before all the names
    said = "" if isinstance(given, dict) or ", not " in needed else f", not {given!r}"
    return f"{where}: {needed}{said}"


def _needed(details: ErrorDetails, at: Sequence[Any]) -> tuple[str, Sequence[str]]:
    """What a value needs to be, in words, and the names that it may be one of."""
    kind, names = details["type"], [str(tag) for each in at for tag in _tags(each)]
    if kind == "union_tag_invalid":
        return f"needs {details['ctx']['discriminator']} to be one of {', '.join(names)}", names
    if kind == "union_tag_not_found":
        return f"needs {details['ctx']['discriminator']}, one of {', '.join(names)}", ()
    if kind in ("model_type", "model_attributes_type", "dataclass_type", "dict_type"):
        if names:
            like = difflib.get_close_matches(str(details["input"]), names, n=1, cutoff=_LIKE) or names
            return f"needs to be a section with a name, as {{name: {like[0]}}} ({', '.join(names)})", ()
        keys = [name for each in at for name in _fields(each)]
        return "needs to be a section" + (f" with keys of {', '.join(keys)}" if keys else ""), ()
    if kind == "literal_error":
        names = re.findall(r"'([^']*)'", str(details["ctx"]["expected"]))
    of, _, wrong = kind.partition("_")
    if of in _KINDS and wrong in ("type", "parsing", "from_float"):
        return f"needs to be {_KINDS[of]}", names
    message = details["msg"].removeprefix("Value error, ")
    return re.sub(r"^[A-Z][a-z]+ should ", "needs to ", message), names


def _unknown(path: Sequence[str], known: set[str], *, of_function: bool) -> str:
    where, name = ".".join(path), path[-1]
    if (now := RENAMED.get(name)) in known:
        return f"{where!r} is called {'.'.join([*path[:-1], now])!r} now"
    if name in ELSEWHERE:
        return f"unknown key {where!r} (what others call {name} is {ELSEWHERE[name]!r} here)"
    if of_function and not difflib.get_close_matches(name, known, n=1, cutoff=_LIKE):
        return f"unknown key {where!r} (a function has no options; a class does, see the end of docs/own_reward.md)"
    if [*path] in _paths(Recipe):
        return f"unknown key {where!r} (another kind of {'.'.join(path[:-1])} has it; its `name` says which kind it is)"
    near = _nearest(path, known)
    if near is None and [*path[:-1]] == ["algorithm"]:
        return f"unknown key {where!r} (a parameter of the preset is set under 'algorithm.parameters')"
    return f"unknown key {where!r}" if near is None else f"unknown key {where!r} (nearest: {near!r})"


def _nearest(path: Sequence[str], known: Iterable[str]) -> str | None:
    """Full path of the known key whose name is most similar to the last part of ``path``; None if none is similar.

    A key of the same section wins, unless another section has a far more similar one; subsections come first then.
    """
    *section, name = path

    def likeness(key: str) -> float:
        return difflib.SequenceMatcher(a=name, b=key).ratio()

    here = max(sorted(known), key=likeness, default="")
    elsewhere: list[list[str]] = [p for p in _paths(Recipe) if likeness(p[-1]) >= 0.8]
    if elsewhere and likeness(here) < 0.75:
        best: list[str] = max(elsewhere, key=lambda p: (likeness(p[-1]), p[: len(section)] == section, -len(p)))
        return ".".join(best)
    return ".".join([*section, here]) if likeness(here) >= _LIKE else None


def _paths(kind: Any, above: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """The path of every key of a section and its subsections; items of lists have none."""
    for alternative in _alternatives(kind):
        for name, inner in _fields(alternative).items():
            yield [*above, name]
            yield from _paths(inner, (*above, name))


def _followed(details: ErrorDetails) -> tuple[list[str], Sequence[Any], Sequence[Any]]:
    """The path of a key as a recipe writes it, the types of the section that holds it, and the types of its value.

    pydantic's ``loc`` contains union tags as well, which are no part of the path.
    """
    path: list[str] = []
    kinds, beside = list(_alternatives(Recipe)), []
    for part in map(str, details["loc"]):
        entered = [inner for k in kinds for name, inner in _fields(k).items() if name == part]
        items = [a for k in kinds if get_origin(k) in (tuple, list) for a in get_args(k) if a is not Ellipsis]
        named = [get_args(k)[1] for k in kinds if get_origin(k) in (dict, Mapping) and len(get_args(k)) == 2]
        tagged = [k for k in kinds if part == getattr(k, "__name__", "") or part in _tags(k)]
        one_of = sum(bool(_fields(k)) for k in kinds) > 1  # then its tag comes first, as of {name: tools, tools: [...]}
        if tagged and (one_of or not entered) and not (items and part.isdigit()):
            kinds = tagged
            continue
        path.append(part)
        beside = kinds
        kinds = [a for inner in entered or named or items for a in _alternatives(inner)]
    return path, beside, kinds


def _alternatives(kind: Any) -> Iterator[Any]:
    if get_origin(kind) is Annotated:
        yield from _alternatives(get_args(kind)[0])
    elif get_origin(kind) in (Union, types.UnionType):
        for inner in get_args(kind):
            yield from _alternatives(inner)
    else:
        yield kind


def _fields(kind: Any) -> dict[str, Any]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return {field.name: field.type for field in dataclasses.fields(kind) if field.init}
    return {}


def _tags(kind: Any) -> tuple[Any, ...]:
    """The values of the key that tells variants of a union apart."""
    fields = _fields(kind)
    return get_args(fields.get("name", fields.get("placement")))
