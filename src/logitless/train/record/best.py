"""The best evaluation of a run so far, for early stopping and for the checkpoint that is kept and exported."""

import math
from collections.abc import Mapping
from typing import Any

from logitless.errors import ConfigurationError
from logitless.train.recipe.evaluation import WatchSection
from logitless.train.record.metrics import Numbers


class Best:
    """The best value of a held-out metric, and how many evaluations have not improved it since.

    Attributes:
        value: the best so far; None before the first finite one.
        block, step: blocks and optimizer steps done when it was measured.

    Example:
        >>> from logitless.train.recipe.evaluation import StopSection
        >>> best = Best(StopSection(metric="evaluation/accuracy", patience=2, min_delta=0.1))
        >>> for block, accuracy in enumerate([0.5, 0.55, 0.58]):
        ...     best.see({"evaluation/accuracy": accuracy}, block=block, step=4 * block)
        >>> best.value, best.block, best.since, best.is_over
        (0.5, 0, 2, True)
    """

    def __init__(self, section: WatchSection) -> None:
        self.section = section
        self.value: float | None = None
        self.block, self.step, self.since = 0, 0, 0

    def see(self, found: Numbers, *, block: int, step: int) -> None:
        """Compare an evaluation with the best one; ignored if the metric's held-out set was not evaluated.

        Args:
            block, step: blocks and optimizer steps done.

        Raises:
            ConfigurationError: the metric is not among those of its set.
        """
        name = self.section.metric
        of_set = sorted(each for each in found if each.startswith(self.section.prefix))
        if not of_set:
            return
        if name not in found:
            raise ConfigurationError(
                needed="a metric of an evaluation in evaluation.stop.metric and checkpoint.keep_best.metric",
                given=f"{name!r}, and there are {', '.join(of_set)}",
                remedy="Name one of them.",
            )
        value, sign = found[name], 1 if self.section.mode == "max" else -1
        if math.isfinite(value) and (self.value is None or sign * (value - self.value) > self.section.least_gain):
            self.value, self.block, self.step, self.since = value, block, step, 0
        else:
            self.since += 1

    @property
    def is_over(self) -> bool:
        """Whether early stopping has run out of patience."""
        return self.since >= self.section.longest_wait

    @property
    def words(self) -> str:
        """Metric, value and block, for people."""
        value = "no finite value" if self.value is None else f"{self.value:.4g} after block {self.block}"
        return f"{self.section.metric} {value}"

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON, with the metric that it belongs to."""
        seen = {name: getattr(self, name) for name in ("value", "block", "step", "since")}
        return {"metric": self.section.metric, "mode": self.section.mode, **seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``; that of another metric is ignored."""
        if (state["metric"], state["mode"]) == (self.section.metric, self.section.mode):
            for name in ("value", "block", "step", "since"):
                setattr(self, name, state[name])
