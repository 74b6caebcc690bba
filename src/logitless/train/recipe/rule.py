"""What the parts of a recipe need of each other, of the processes, of the machine and of the model: one list, as data.

It is read where a recipe is checked, before a run starts, where ``auto`` chooses, by doctor, and by the page on recipes
(docs/configuration.md). A rule stands in the file of the part that it is about. Its subject is a recipe, or a recipe
with what else is known by then.
"""

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from logitless.distributed.arrangement import Arrangement
from logitless.errors import ConfigurationError, LogitlessError, UnavailableError
from logitless.objective.algorithm import Algorithm

if TYPE_CHECKING:
    from logitless.train.recipe.config import Recipe

Subject = TypeVar("Subject")
Whole = TypeVar("Whole")


def _always(_: Any) -> bool:
    return True


def _nothing(_: Any) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Setting(Generic[Subject]):
    """A choice that a recipe may make.

    Args:
        words: in which a recipe makes it; they stand in errors and on the page.
        when: whether a subject has it; by default every subject has.
    """

    words: str
    when: Callable[[Subject], bool] = _always

    def needs(
        self,
        needed: str,
        *,
        holds: Callable[[Subject], bool],
        given: Callable[[Subject], str],
        remedy: str,
        instead: Callable[[Subject], tuple[str, ...]] = _nothing,
        kind: type[LogitlessError] = ConfigurationError,
    ) -> "Rule[Subject]":
        """The rule that the setting needs something; for the arguments see there."""
        return Rule(self, needed, holds, given, remedy, instead, kind)

    def on(self, part: Callable[[Whole], Subject]) -> "Setting[Whole]":
        """The same setting of something that has its subject as a part."""
        return Setting(self.words, lambda whole: self.when(part(whole)))


@dataclass(frozen=True)
class Rule(Generic[Subject]):
    """What a setting needs.

    Args:
        setting: whose rule it is.
        needed: what it needs, as a noun phrase.
        holds: whether there is that.
        given: what there is instead; asked only where the rule does not hold.
        remedy: what to do about it, as an imperative sentence.
        instead: ``key=value`` of settings that do without it, which doctor proposes.
        kind: of the error.

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
        """Whether a subject has the setting and not what it needs."""
        return self.setting.when(subject) and not self.holds(subject)

    def error(self, subject: Subject) -> LogitlessError:
        """That the rule is broken, in words."""
        return self.kind(
            needed=f"for {self.setting.words}: {self.needed}", given=self.given(subject), remedy=self.remedy
        )

    def on(self, part: Callable[[Whole], Subject]) -> "Rule[Whole]":
        """The same rule of something that has its subject as a part."""
        return self.setting.on(part).needs(
            self.needed,
            holds=lambda whole: self.holds(part(whole)),
            given=lambda whole: self.given(part(whole)),
            remedy=self.remedy,
            instead=lambda whole: self.instead(part(whole)),
            kind=self.kind,
        )


def check(rules: Iterable[Rule[Subject]], subject: Subject) -> None:
    """Refuse a subject that breaks a rule, in the words of the first one.

    Raises:
        LogitlessError: of the kind that the rule names.
    """
    for rule in rules:
        if rule.is_broken(subject):
            raise rule.error(subject)


def unmet(rules: Iterable[Rule[Subject]], subject: Subject) -> list[LogitlessError]:
    """What keeps ``auto`` from settings: their rules that do not hold, whether or not the subject has the settings."""
    return [rule.error(subject) for rule in rules if not rule.holds(subject)]


@dataclass(frozen=True)
class Processes:
    """A recipe as several processes are to run it.

    Args:
        recipe: checked.
        world: number of processes.
        arrangement: of them.
    """

    recipe: "Recipe"
    world: int
    arrangement: Arrangement


@dataclass(frozen=True)
class Machine:
    """A recipe on a machine.

    Args:
        recipe: checked.
        device: that the policy is to run on, ``cpu`` or ``cuda``, on this machine or on one that is planned for.
    """

    recipe: "Recipe"
    device: str

    def lacks(self, package: str | None = None) -> str:
        """What of a GPU and a package beside it is not there; empty where both are."""
        if self.device != "cuda":
            return "no GPU"
        return "" if package is None or is_installed(package) else f"no {package}"


@dataclass(frozen=True)
class Composed:
    """A recipe with the algorithm that it names.

    Args:
        recipe: checked.
        algorithm: its preset with its replacements.
    """

    recipe: "Recipe"
    algorithm: Algorithm


def is_installed(package: str) -> bool:
    """Whether a package can be imported here."""
    return importlib.util.find_spec(package) is not None


def refusal(checked: Callable[[], Any]) -> str:
    """What a check of a part by itself says was given to it; empty where it passes."""
    try:
        checked()
    except LogitlessError as error:
        return error.given
    return ""


def needs_whole_weights(setting: Setting["Recipe"], why: str, remedy: str) -> Rule[Processes]:
    """A setting that does without sharding."""
    return setting.on(_of_processes).needs(
        f"all weights on every process{why}",
        holds=lambda processes: not processes.arrangement.is_sharded,
        given=lambda processes: f"weights sharded over {processes.arrangement.weights}",
        remedy=remedy,
    )


def needs_one_process(setting: Setting["Recipe"], why: str, remedy: str) -> Rule[Processes]:
    """A setting of one process alone."""
    return setting.on(_of_processes).needs(
        f"one process{why}",
        holds=lambda processes: processes.world == 1,
        given=lambda processes: str(processes.world),
        remedy=remedy,
    )


def needs_gpu(setting: Setting["Recipe"], needed: str, instead: str, package: str | None = None) -> Rule[Machine]:
    """A setting that runs on a GPU alone, where a package is that it is made with."""
    return setting.on(_of_machine).needs(
        needed,
        holds=lambda machine: not machine.lacks(package),
        given=lambda machine: machine.lacks(package),
        remedy=f"Set {instead.replace('=', ': ')}.",
        instead=lambda _: (instead,),
    )


def needs_package(setting: Setting["Recipe"], package: str, extra: str, instead: str | None) -> Rule[Machine]:
    """A setting that is made with a package of an extra."""
    install = f"pip install 'logitless[{extra}]'"
    return setting.on(_of_machine).needs(
        package,
        holds=lambda _: is_installed(package),
        given=lambda _: "none installed",
        remedy=f"{install}." if instead is None else f"{install}, or set {instead.replace('=', ': ')}.",
        instead=lambda _: () if instead is None else (instead,),
        kind=UnavailableError,
    )


def _of_processes(processes: Processes) -> "Recipe":
    return processes.recipe


def _of_machine(machine: Machine) -> "Recipe":
    return machine.recipe
