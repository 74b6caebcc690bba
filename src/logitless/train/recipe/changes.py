"""Which keys of a recipe may change when a run is resumed: those that change no trained weight, or rounding only.

A change of any other key makes another run: a fork of a checkpoint (``fork.py``), in a folder of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeAlias

from logitless.errors import ConfigurationError
from logitless.objective.algorithm import Algorithm
from logitless.train.recipe.config import Recipe

KeyPath: TypeAlias = tuple[str, ...]

UNTRAINED = (
    *("output", "checkpoint", "writers", "evaluation", "rollout.parity", "train.blocks"),
    *("train.max_skipped_in_a_row", "train.max_unscored_fraction", "train.max_blocks_unscored"),
    "train.max_blocks_without_signal",
)
"""Sections and keys that no trained weight depends on: what is written, measured and reported, and when a run ends."""

ROUNDING = (
    *("parallel", "rollout.max_rows", "rollout.prefill_tokens", "rollout.engine.memory"),
    *("train.tokens_per_micro_batch", "train.share_prompts", "train.pack_by_cost", "train.activation_memory"),
    *("train.head_memory_budget", "model.gradient_checkpointing"),
)
"""How much is computed at a time: loss and gradient are sums of the same terms, added in another order."""

MOVED = (  # the file's content must stay the same, which its digest in provenance.json proves
    *("model.tokenizer", "teacher.source", "data.train.path", "data.train.sources.*.data.path", "data.held_out.path"),
    *("warm_start.data.path", "rollout.engine.path"),
    *(f"rollout.engine.{key}" for key in ("urls", "api_key_file", "api_key_variable", "give_up_seconds")),
)
"""Paths and addresses, which may change where the content stays the same."""


@dataclass(frozen=True)
class Change:
    """A value that differs between two recipes.

    Args:
        path: names of the sections and of the key.
        before: the run's value; None where the key was absent.
        after: the new value.
    """

    path: KeyPath
    before: Any
    after: Any

    @property
    def key(self) -> str:
        """The key as ``--set`` names it."""
        return ".".join(self.path)

    @property
    def values(self) -> tuple[str, str]:
        """Both values as text; of long ones the part around the first difference.

        Example:
            >>> Change(("seed",), None, "a" * 50 + "bc").values
            ('none', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...')
            >>> Change(("seed",), "a" * 50, "a" * 50 + "bc").values
            ('...aaaaaaaaaaaaaaaaaaaa', '...aaaaaaaaaaaaaaaaaaaabc')
        """
        texts = ["none" if value is None else str(value) for value in (self.before, self.after)]
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
        start = max(0, alike - 20)
        before, after = (_short("..." * bool(start) + text[start:]) if len(text) > 40 else text for text in texts)
        return before, after

    @property
    def words(self) -> str:
        """The key, its value now, and the run's.

        Example:
            >>> Change(("train", "blocks"), 1, 2).words
            'train.blocks (2, not 1)'
        """
        before, after = self.values
        return f"{self.key} ({after}, not {before})"

    @property
    def rounds(self) -> bool:
        """Whether it changes the order of sums, and with it the last bits."""
        return self.is_below(ROUNDING)

    def is_below(self, patterns: Sequence[str]) -> bool:
        """Whether the key is one of the patterns or lies in a section that is one; a star stands for any name.

        Example:
            >>> change = Change(("parallel", "shard"), 1, 2)
            >>> change.is_below(["parallel"]), change.is_below(["parallel.replicate"])
            (True, False)
        """
        split = (pattern.split(".") for pattern in patterns)
        return any(
            len(parts) <= len(self.path) and all(p in ("*", q) for p, q in zip(parts, self.path, strict=False))
            for parts in split
        )


def changes(before: Recipe, after: Recipe) -> list[Change]:
    """Every value that differs, by key; lists are compared as a whole."""
    return list(_differing((), before.model_dump(mode="json"), after.model_dump(mode="json")))


def check_resumed(before: Recipe, after: Recipe, algorithm: Algorithm, *, can_fork: Callable[[], bool]) -> list[Change]:
    """What changed since a run was started; refuses a change that a resumed run cannot make.

    Args:
        can_fork: whether a fork of the run can use ``after``, for the error's remedy.

    Raises:
        ConfigurationError: a key that may not change, or another cut into micro-batches under an algorithm whose loss
            depends on it.
    """
    found = changes(before, after)
    _check_dtypes([change for change in found if change.key in ("model.trained_dtype", "model.dtype")])
    fixed = [change for change in found if not change.is_below((*UNTRAINED, *ROUNDING, *MOVED))]
    if fixed:
        other = "start a run of another name" + (", from this run's checkpoint by --fork RUN" if can_fork() else "")
        raise ConfigurationError(
            needed="the recipe that the run was started with",
            given=f"another {'; '.join(each.words for each in fixed)}",
            remedy=f"Repeat the --set of the first start, or {other}.",
        )
    cuts = [f"train.{key}" for key in ("tokens_per_micro_batch", "share_prompts", "pack_by_cost")]
    cut = [change.words for change in found if change.is_below(cuts)]
    parts = parts_per_micro_batch(algorithm)
    if cut and parts:
        raise ConfigurationError(
            needed=f"the micro-batches that the run was started with, on which {', '.join(parts)} depends",
            given=f"another {'; '.join(cut)}",
            remedy="Repeat the --set of the first start.",
        )
    return found


def _check_dtypes(found: Sequence[Change]) -> None:
    """Refuse another dtype, which may come from ``auto``, and name the keys that bring the earlier one back."""
    if not found:
        return
    had = ", ".join(f"{change.key}: {change.before}" for change in found)
    has = ", ".join(f"{change.key}: {change.after}" for change in found)
    kept = " ".join(f"--set {change.key}={change.before}" for change in found)
    raise ConfigurationError(
        needed=f"{had}, as in the run's config.yaml",
        given=f"{has}, which is what the recipe sets, or what auto is on this machine",
        remedy=f"Go on where auto is the same, or add {kept}: the run then keeps its dtype, on a machine that may "
        "round otherwise.",
    )


def parts_per_micro_batch(algorithm: Algorithm) -> list[str]:
    """Parts of an algorithm that choose or average within a micro-batch, so that the loss depends on how it is cut.

    Example:
        >>> from logitless.objective import presets
        >>> parts_per_micro_batch(presets.grpo())
        []
    """
    objective = algorithm.objective
    parts = {
        f"algorithm.surrogate ({objective.surrogate.name})": objective.surrogate.selects,
        "algorithm.entropy_bonus": getattr(objective.entropy_bonus, "scope", None),
        **{f"algorithm.filters ({each.name})": getattr(each, "scope", None) for each in objective.filters},
    }
    found = [name for name, scope in parts.items() if scope == "micro_batch"]
    return found + ["algorithm.weighting"] * (algorithm.weighting.name == "micro_batch_token_mean")


def in_words(found: Sequence[Change]) -> list[str]:
    """A line that lists the changes, and a second one where they change rounding; none without changes.

    Example:
        >>> in_words([Change(("train", "tokens_per_micro_batch"), 64, 32)])[0]
        'changed: train.tokens_per_micro_batch from 64 to 32'
    """
    lines = [f"changed: {'; '.join('{} from {} to {}'.format(c.key, *c.values) for c in found)}"]
    rounding = [change.key for change in found if change.rounds]
    if rounding:
        lines.append(
            f"from here on the last bits may differ from those without the change: {', '.join(rounding)} adds the same "
            "terms in another order"
        )
    return lines if found else []


def as_json(found: Sequence[Change]) -> dict[str, Any]:
    """For ``provenance.json``: old and new value by key, and whether rounding changes.

    Example:
        >>> as_json([Change(("train", "blocks"), 1, 2)])
        {'train.blocks': {'from': 1, 'to': 2, 'rounding': False}}
    """
    return {c.key: {"from": c.before, "to": c.after, "rounding": c.rounds} for c in found}


def _differing(path: KeyPath, before: Any, after: Any) -> list[Change]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        keys = sorted({*before, *after})
        return [c for key in keys for c in _differing((*path, str(key)), before.get(key), after.get(key))]
    return [] if before == after else [Change(path, before, after)]


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
