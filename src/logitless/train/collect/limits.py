"""Limits that stop a run which trains on nothing: rewards fail, or all completions of a prompt score the same."""

from collections.abc import Sequence

from logitless.errors import TrainingError
from logitless.rewards.statistics import failed_shares
from logitless.train.collect.failures import shown
from logitless.types import Group, Verdict

NO_SIGNAL_YET = (
    "rewards give no completion an advantage, so that nothing can be learned from them yet. A hard task may begin so. "
    "If it stays so, mend a reward that scores all completions alike (a function gets one a call), choose a task that "
    "the policy solves at times, warm-start it, or raise the temperature or the group size"
)
"""Said of a first block."""


class UnscoredLimit:
    """Stops a run after some blocks in a row in which a reward failed too often, or after a first one of errors alone.

    Example:
        >>> from logitless.types import Completion, Prompt
        >>> limit = UnscoredLimit(max_fraction=0.5, max_blocks=2)
        >>> failed = Verdict(score=None, status="error", message="raised: KeyError: 'answer'")
        >>> group = Group(Prompt("1", "", ()), (Completion("1", (), "", "stop"),), ({"mine": failed},), (None,))
        >>> limit.see([group])
        >>> limit.in_a_row
        1
    """

    def __init__(self, *, max_fraction: float, max_blocks: int) -> None:
        self.max_fraction, self.max_blocks, self.in_a_row = max_fraction, max_blocks, 0

    def see(self, groups: Sequence[Group], *, is_first: bool = False) -> None:
        """Count a block.

        Raises:
            TrainingError: one too many in a row, or an error at every completion of the first; the first failure is in
                the message.
        """
        share, name = unscored_share(groups)
        self.in_a_row = self.in_a_row + 1 if share > self.max_fraction else 0
        if is_first and self.in_a_row:
            _check_first(groups)
        if self.in_a_row < self.max_blocks:
            return
        raise TrainingError(
            needed=f"at most {self.max_fraction:.0%} of completions unscored (train.max_unscored_fraction)",
            given=f"{share:.0%} by {name}, and as bad for {self.in_a_row} blocks in a row. The first: "
            f"{_first_failure(groups, name)}",
            remedy="Repair it; verdict/... in metrics.jsonl says since when. Where it may fail as often, raise "
            "train.max_unscored_fraction.",
        )


class SignalLimit:
    """Stops a run after some blocks in a row without anything to train on.

    Example:
        >>> limit = SignalLimit(max_blocks=2)
        >>> limit.see([], has_signal=False)
        >>> limit.in_a_row
        1
    """

    def __init__(self, *, max_blocks: int) -> None:
        self.max_blocks, self.in_a_row = max_blocks, 0

    def see(self, groups: Sequence[Group], *, has_signal: bool) -> None:
        """Count a block.

        Raises:
            TrainingError: one too many in a row.
        """
        self.in_a_row = 0 if has_signal else self.in_a_row + 1
        if self.in_a_row < self.max_blocks:
            return
        if groups and all(reward is None for group in groups for reward in group.rewards):
            raise TrainingError(
                needed="completions with a score",
                given=f"none in the last of {self.in_a_row} blocks without a signal. The first: "
                f"{_first_failure(groups, 'all functions')}",
                remedy="Repair the reward: `logitless doctor RECIPE` scores one batch with it.",
            )
        raise TrainingError(
            needed="completions of a prompt that differ in reward",
            given=f"none in {self.max_blocks} blocks (train.max_blocks_without_signal)",
            remedy="Choose an easier task, warm-start the policy, raise the temperature or the group size.",
        )


def unscored_share(groups: Sequence[Group]) -> tuple[float, str]:
    """The largest share of failed verdicts of a reward, or of completions without any reward, and the reward's name.

    ``missing`` is no failure: a reward may be for some of the rows only.
    """
    rewards = [reward for group in groups for reward in group.rewards]
    shares = failed_shares([verdicts for group in groups for verdicts in group.verdicts])
    shares["all functions"] = rewards.count(None) / len(rewards) if rewards else 0.0
    name = max(shares, key=lambda each: shares[each])  # of equal ones the first
    return shares[name], name


def _check_first(groups: Sequence[Group]) -> None:
    """Refuse a block in which a reward or the environment raised for every completion: the next would be no better.

    A timeout may be of a server that was still starting, and waits for ``max_blocks``.
    """
    errors = [
        [(name, verdict) for name, verdict in verdicts.items() if verdict.status == "error"]
        for group in groups
        for verdicts in group.verdicts
    ]
    if errors and all(errors):
        name, verdict = errors[0][0]
        traced = "; its traceback is above" if verdict.traceback else ""
        raise TrainingError(
            needed="a completion of the first block that is scored without an error",
            given=f"an error at each of {len(errors)}, the first by {name}: {shown(verdict).splitlines()[0]}",
            remedy=f"Repair it{traced}. `logitless doctor RECIPE` scores one batch.",
        )


def _first_failure(groups: Sequence[Group], name: str) -> str:
    found: list[Verdict] = [
        verdict
        for group in groups
        for verdicts in group.verdicts
        for called, verdict in verdicts.items()
        if verdict.score is None and (called == name or name == "all functions")
    ]
    return shown(min(found, key=lambda verdict: not verdict.failed)) if found else "no verdict"
