"""A taskset of verifiers: small sums."""

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["Sums"]


class Row(vf.TaskData):
    answer: str


class Sum(vf.Task[Row]):
    @vf.reward
    async def exact(self, task: Row, trace: vf.Trace) -> float:
        """Whether the last message has the sum."""
        written = trace.assistant_messages
        return float(task.answer in (written[-1].content or ""))


class Sums(vf.Taskset[Sum]):
    def load(self) -> Iterable[Sum]:
        for a in range(3):
            yield Sum(Row(prompt=f"{a}+{a}=", answer=str(2 * a)), self.config.task)
