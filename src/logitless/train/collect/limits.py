"""When a run stops instead of training to its end on nothing: its rewards fail, or say the same of every completion."""

from collections.abc import Sequence

from logitless.errors import TrainingError
from logitless.rewards.statistics import failed_shares
from logitless.train.collect.failures import shown
from logitless.types import Group, Verdict


class UnscoredLimit:
    """Counts blocks in a row of which too large a share could not be scored.

    Args:
        max_fraction: of the completions of a block that a reward judges.
        max_blocks: in a row over it, which stop the run.

    Attributes:
        in_a_row: blocks over the limit, up to now.

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

    def see(self, drawn: Sequence[Group]) -> None:
        """Count a block.

        Args:
            drawn: all its groups.

        Raises:
            TrainingError: one too many in a row; the first failure is in the message.
        """
        share, name = unscored_share(drawn)
        self.in_a_row = self.in_a_row + 1 if share > self.max_fraction else 0
        if self.in_a_row < self.max_blocks:
            return
        raise TrainingError(
            needed=f"at most {self.max_fraction:.0%} of completions unscored (train.max_unscored_fraction)",
            given=f"{share:.0%} by {name}, and as bad for {self.in_a_row} blocks in a row. The first: "
            f"{_first_failure(drawn, name)}",
            remedy="Repair the reward; verdict/... in metrics.jsonl says since when. Where it may fail as often, raise "
            "train.max_unscored_fraction.",
        )


class SignalLimit:
    """Counts blocks in a row that left nothing to train on.

    Args:
        max_blocks: in a row, which stop the run.

    Attributes:
        in_a_row: such blocks, up to now.

    Example:
        >>> limit = SignalLimit(max_blocks=2)
        >>> limit.see([], has_signal=False)
        >>> limit.in_a_row
        1
    """

    def __init__(self, *, max_blocks: int) -> None:
        self.max_blocks, self.in_a_row = max_blocks, 0

    def see(self, drawn: Sequence[Group], *, has_signal: bool) -> None:
        """Count a block.

        Args:
            drawn: all its groups.
            has_signal: whether there was a token to train on.

        Raises:
            TrainingError: one too many in a row.
        """
        self.in_a_row = 0 if has_signal else self.in_a_row + 1
        if self.in_a_row < self.max_blocks:
            return
        if drawn and all(reward is None for group in drawn for reward in group.rewards):
            raise TrainingError(
                needed="completions with a score",
                given=f"none in the last of {self.in_a_row} blocks without a signal. The first: "
                f"{_first_failure(drawn, 'all functions')}",
                remedy="Repair the reward: `logitless doctor RECIPE` scores one batch with it.",
            )
        raise TrainingError(
            needed="completions of a prompt that differ in reward",
            given=f"none in {self.max_blocks} blocks (train.max_blocks_without_signal)",
            remedy="Choose an easier task, warm-start the policy, raise the temperature or the group size.",
        )


def unscored_share(drawn: Sequence[Group]) -> tuple[float, str]:
    """The largest share of its completions that a reward failed at, or of all that got no reward, and whose it is.

    A verdict ``missing`` is not a failure of its function, which may be there for some of the rows only.
    """
    rewards = [reward for group in drawn for reward in group.rewards]
    shares = failed_shares([verdicts for group in drawn for verdicts in group.verdicts])
    shares["all functions"] = rewards.count(None) / len(rewards) if rewards else 0.0
    name = max(shares, key=lambda each: shares[each])  # of equal ones the first
    return shares[name], name


def _first_failure(drawn: Sequence[Group], name: str) -> str:
    found: list[Verdict] = [
        verdict
        for group in drawn
        for verdicts in group.verdicts
        for called, verdict in verdicts.items()
        if verdict.score is None and (called == name or name == "all functions")
    ]
    return shown(min(found, key=lambda verdict: not verdict.failed)) if found else "no verdict"
