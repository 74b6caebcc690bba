"""Messages about rewards that fail: each kind of error once, with its traceback, and a deadline that most hit once."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from logitless.rewards.reward import WeightedReward
from logitless.rewards.statistics import by_reward
from logitless.rewards.user_function import Function
from logitless.rewards.workers.pooled import hit_deadline
from logitless.types import Group, Verdict

MOST_KINDS = 5
"""Most kinds of error that are shown of a reward: its messages may differ at every completion."""

MOST_HIT = 0.5
"""Share of a reward's completions over its deadline from which a message says so."""


class Failures:
    """Makes messages about failed verdicts that were not reported before.

    Example:
        >>> from logitless.rewards.reward import weighted
        >>> from logitless.rewards.text.length import Length
        >>> from logitless.types import Completion, Prompt
        >>> failed = Verdict(score=None, status="error", message="raised: KeyError: 'answer'")
        >>> group = Group(Prompt("1", "", ()), (Completion("1", (), "", "stop"),), ({"mine": failed},), (None,))
        >>> failures = Failures(weighted([Length(label="mine")]))
        >>> failures.new([group])
        ["reward 'mine' failed at 1 of 1 completions (error): raised: KeyError: 'answer'"]
        >>> failures.new([group]), first_failures([group])
        ([], {'mine': "raised: KeyError: 'answer'"})
    """

    def __init__(self, rewards: Sequence[WeightedReward]) -> None:
        self._rewards = {entry.name: (number, entry) for number, entry in enumerate(rewards)}
        self._told: dict[str, set[str]] = {}
        self._deadlines_told: set[str] = set()

    def new(self, groups: Sequence[Group]) -> list[str]:
        """New messages about the verdicts of these groups."""
        return [
            message
            for name, verdicts in by_reward(row for group in groups for row in group.verdicts).items()
            for message in (*self._errors(name, verdicts), *self._deadline(name, verdicts))
        ]

    def _errors(self, name: str, verdicts: Sequence[Verdict]) -> Iterator[str]:
        failed = [verdict for verdict in verdicts if verdict.failed]
        counts = Counter(map(_kind, failed))
        told = self._told.setdefault(name, set())
        for kind, count in counts.items():
            if kind in told or len(told) >= MOST_KINDS:
                continue
            told.add(kind)
            first = next(verdict for verdict in failed if _kind(verdict) == kind)
            yield f"reward {name!r} failed at {count} of {len(verdicts)} completions ({first.status}): {shown(first)}"

    def _deadline(self, name: str, verdicts: Sequence[Verdict]) -> Iterator[str]:
        hit = [verdict for verdict in verdicts if hit_deadline(verdict)]
        if name in self._deadlines_told or name not in self._rewards or len(hit) <= MOST_HIT * len(verdicts):
            return
        number, entry = self._rewards[name]
        seconds = getattr(entry.reward, "deadline_seconds", None)
        if seconds is None:
            return
        self._deadlines_told.add(name)
        unscored = sum(verdict.score is None for verdict in hit)
        at_the_top = ""
        if isinstance(entry.reward, Function):  # workers import its file before the first deadline begins
            at_the_top = "What a call imports or loads, load at the top of its file: no deadline counts that. "
        yield (
            f"reward {name!r}: {len(hit)} of {len(verdicts)} completions hit its deadline of {seconds:g} s and were "
            f"not graded: {unscored} have no score, {len(hit) - unscored} that of a wrong answer. {at_the_top}If the "
            f"reward needs longer, raise rewards.{number}.deadline_seconds."
        )


def shown(verdict: Verdict) -> str:
    """A failed verdict for people: its message and, below it, its traceback."""
    return "\n".join(part for part in (verdict.message.strip(), verdict.traceback.strip()) if part) or verdict.status


def first_failures(groups: Sequence[Group]) -> dict[str, str]:
    """The first failure of each reward that failed, in one line, by the reward's name."""
    first = {
        name: next((verdict for verdict in verdicts if verdict.failed), None)
        for name, verdicts in by_reward(row for group in groups for row in group.verdicts).items()
    }
    return {name: in_a_line(verdict) for name, verdict in first.items() if verdict is not None}


def in_a_line(verdict: Verdict) -> str:
    """A failed verdict in one line: the last line of its traceback, or of its message.

    Example:
        >>> in_a_line(Verdict(None, "error", message="raised", traceback="KeyError: 'answer'"))
        "KeyError: 'answer'"
    """
    return shown(verdict).splitlines()[-1]


def counts_in_words(statistics: Mapping[str, int]) -> str:
    """How many verdicts have which status, and the share that failed.

    Example:
        >>> counts_in_words({"graded": 6, "ungradable": 0, "error": 3, "timeout": 1, "missing": 0})
        '6 graded, 0 ungradable, 3 error, 1 timeout, 0 missing; failed at 40%'
    """
    total = sum(statistics.values())
    failed = statistics["error"] + statistics["timeout"]
    text = ", ".join(f"{count} {status}" for status, count in statistics.items())
    return f"{text}; failed at {failed / total:.0%}" if failed else text


def _kind(verdict: Verdict) -> str:
    """Status and exception type; what follows the type in the message differs among failures of one kind."""
    return ": ".join([verdict.status, *verdict.message.split(": ")[:2]])
