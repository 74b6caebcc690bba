"""Rules: what a setting of a recipe needs of other settings, of the number of processes, of the machine or the model.

Rules are data, for they are read in several places: where a recipe is checked, before a run starts, where ``auto``
chooses, by doctor, and by docs/configuration.md. Each stands in the file of the section that it is about. Its subject
is the recipe, alone or with what is known later: ``Processes``, ``Machine`` or ``Composed``.
"""

import importlib.util
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from logitless.distributed.arrangement import Arrangement
from logitless.errors import ConfigurationError, LogitlessError, UnavailableError
from logitless.installed import without_triton
from logitless.objective.algorithm import Algorithm

if TYPE_CHECKING:
    from logitless.train.recipe.config import Recipe

Subject = TypeVar("Subject")
Whole = TypeVar("Whole")


def value_at(recipe: Any, key: str) -> Any:
    """The value of a key in a recipe or section; None below a section that is left out."""
    for name in key.split("."):
        recipe = None if recipe is None else getattr(recipe, name)
    return recipe


def given(key: str, words: str = "") -> "Setting[Recipe]":
    """The setting of a key, or of a section's property: not null, false, 0 or empty.

    Its words are the key unless given.
    """
    return Setting(words or key, lambda recipe: bool(value_at(recipe, key)))


def chosen(key: str, *values: str) -> "Setting[Recipe]":
    """The setting of a key to one of these values.

    Example:
        >>> chosen("rollout.engine.name", "gpu", "auto").words
        'rollout.engine gpu or auto'
    """
    words = f"{key.removesuffix('.name')} {' or '.join(values)}"
    return Setting(words, lambda recipe: value_at(recipe, key) in values)


def _shown(value: Any) -> str:
    """A value as in a recipe; a section is shortened."""
    return json.dumps(value, default=lambda _: "...").strip('"')


@dataclass(frozen=True)
class Setting(Generic[Subject]):
    """A choice that a recipe may make.

    Args:
        words: its name, as errors and docs/configuration.md show it.
        when: whether a subject makes this choice; by default every subject does.
        of: prefix of the recipe's keys that are the subject's own; empty where the subject is the recipe.
    """

    words: str
    when: Callable[[Subject], bool] = lambda _: True
    of: str = ""

    def needs(
        self,
        needed: str,
        *,
        given: Callable[[Subject], str],
        remedy: str,
        holds: Callable[[Subject], bool] | None = None,
        instead: Callable[[Subject], tuple[str, ...]] = lambda _: (),
        kind: type[LogitlessError] = ConfigurationError,
    ) -> "Rule[Subject]":
        """The rule that this setting needs something; the arguments are those of ``Rule``.

        Without ``holds`` the rule holds where ``given`` finds nothing to report (an empty text).
        """
        return Rule(self, needed, holds or (lambda subject: not given(subject)), given, remedy, instead, kind)

    def keeps(self, key: str, value: Any, why: str = "", *, remedy: str = "") -> "Rule[Subject]":
        """The rule that this setting needs a key to have a value."""
        return self.about(key, f"{key}: {_shown(value)}{why}", lambda found: found == value, remedy)

    def excludes(self, key: str, why: str = "", *, remedy: str = "") -> "Rule[Subject]":
        """The rule that this setting needs a key to be left out: null, false, 0 or empty."""
        return self.about(key, f"no {key}{why}", lambda found: not found, remedy)

    def requires(self, key: str, why: str = "", *, remedy: str) -> "Rule[Subject]":
        """The rule that this setting needs a key to be given."""
        return self.about(key, f"{key}{why}", bool, remedy)

    def about(self, key: str, needed: str, holds: Callable[[Any], bool], remedy: str) -> "Rule[Subject]":
        """The rule that this setting needs something of the value of a key."""
        name = key.removeprefix(self.of)
        return self.needs(
            needed,
            holds=lambda subject: holds(value_at(subject, name)),
            given=lambda subject: f"{key}: {_shown(value_at(subject, name))}",
            remedy=remedy or f"Leave {key} out.",
        )

    def on(self, part: Callable[[Whole], Subject]) -> "Setting[Whole]":
        """The same setting, of a subject that contains this one's as a part."""
        return Setting(self.words, lambda whole: self.when(part(whole)))


@dataclass(frozen=True)
class Rule(Generic[Subject]):
    """What a setting needs.

    Args:
        setting: that needs something.
        needed: what it needs, as a noun phrase.
        holds: whether the subject has what is needed.
        given: what the subject has instead; for a subject that breaks the rule.
        remedy: what the user can do, as an imperative sentence.
        instead: ``key=value`` of other settings that do not need it, which doctor proposes.
        kind: class of the error.

    Example:
        >>> rule = Setting[int]("n").needs("a positive number", holds=lambda n: n > 0, given=str, remedy="Raise it.")
        >>> str(rule.error(-1))
        'needed for n: a positive number; given -1. Raise it.'
    """

    setting: Setting[Subject]
    needed: str
    holds: Callable[[Subject], bool]
    given: Callable[[Subject], str]
    remedy: str
    instead: Callable[[Subject], tuple[str, ...]]
    kind: type[LogitlessError]

    def is_broken(self, subject: Subject) -> bool:
        """Whether the subject has the setting and lacks what the setting needs."""
        return self.setting.when(subject) and not self.holds(subject)

    def error(self, subject: Subject) -> LogitlessError:
        """The error for a subject that breaks the rule."""
        return self.kind(
            needed=f"for {self.setting.words}: {self.needed}", given=self.given(subject), remedy=self.remedy
        )

    def on(self, part: Callable[[Whole], Subject]) -> "Rule[Whole]":
        """The same rule, of a subject that contains this one's as a part."""
        return self.setting.on(part).needs(
            self.needed,
            holds=lambda whole: self.holds(part(whole)),
            given=lambda whole: self.given(part(whole)),
            remedy=self.remedy,
            instead=lambda whole: self.instead(part(whole)),
            kind=self.kind,
        )


def check(rules: Iterable[Rule[Subject]], subject: Subject) -> None:
    """Raise the error of the first rule that the subject breaks.

    Raises:
        LogitlessError: of the rule's ``kind``.
    """
    for rule in rules:
        if rule.is_broken(subject):
            raise rule.error(subject)


def unmet(rules: Iterable[Rule[Subject]], subject: Subject) -> list[LogitlessError]:
    """Errors of all rules that do not hold, whether or not the subject has the setting: why ``auto`` avoids it."""
    return [rule.error(subject) for rule in rules if not rule.holds(subject)]


@dataclass(frozen=True)
class Processes:
    """A recipe on a number of processes.

    Args:
        arrangement: how weights and sequences are divided among them.
    """

    recipe: "Recipe"
    world: int
    arrangement: Arrangement


@dataclass(frozen=True)
class Machine:
    """A recipe on a machine.

    Args:
        device: type of the policy's device, ``cpu`` or ``cuda``, on this machine or on the one that is planned for.
    """

    recipe: "Recipe"
    device: str

    def lacks(self, *, kernels: bool) -> str:
        """That a GPU, or what Triton compiles its kernels with, is missing, in words; empty where they are there."""
        if self.device != "cuda":
            return "no GPU"
        return without_triton() if kernels else ""


@dataclass(frozen=True)
class Composed:
    """A recipe with the algorithm that it names."""

    recipe: "Recipe"
    algorithm: Algorithm


def recipe_of(subject: Any) -> "Recipe":
    """The recipe of a subject that has one, for ``Setting.on``."""
    recipe: Recipe = subject.recipe
    return recipe


def is_installed(package: str) -> bool:
    """Whether a package can be imported here."""
    return importlib.util.find_spec(package) is not None


def refusal(check_part: Callable[[], Any]) -> str:
    """The ``given`` of the error that a check raises; empty where it passes."""
    try:
        check_part()
    except LogitlessError as error:
        return error.given
    return ""


def needs_whole_weights(setting: Setting["Recipe"], why: str, remedy: str) -> Rule[Processes]:
    """The rule of a setting that does not work with sharded weights."""
    return setting.on(recipe_of).needs(
        f"all weights on every process{why}",
        holds=lambda processes: not processes.arrangement.is_sharded,
        given=lambda processes: f"weights sharded over {processes.arrangement.weights}",
        remedy=remedy,
    )


def needs_one_process(setting: Setting["Recipe"], why: str, remedy: str) -> Rule[Processes]:
    """The rule of a setting that works in a single process only."""
    return setting.on(recipe_of).needs(
        f"one process{why}",
        holds=lambda processes: processes.arrangement.world == 1,
        given=lambda processes: str(processes.arrangement.world),
        remedy=remedy,
    )


def needs_gpu(setting: Setting["Recipe"], needed: str, instead: str, *, kernels: bool = False) -> Rule[Machine]:
    """The rule of a setting that needs a GPU, and with ``kernels`` Triton."""
    return setting.on(recipe_of).needs(
        needed,
        given=lambda machine: machine.lacks(kernels=kernels),
        remedy=f"Set {instead.replace('=', ': ')}.",
        instead=lambda _: (instead,),
    )


def needs_package(setting: Setting["Recipe"], package: str, extra: str, instead: str | None) -> Rule[Machine]:
    """The rule of a setting that needs a package, which an extra of logitless installs."""
    install = f"pip install 'logitless[{extra}]'"
    return setting.on(recipe_of).needs(
        package,
        holds=lambda _: is_installed(package),
        given=lambda _: "none installed",
        remedy=f"{install}." if instead is None else f"{install}, or set {instead.replace('=', ': ')}.",
        instead=lambda _: () if instead is None else (instead,),
        kind=UnavailableError,
    )
