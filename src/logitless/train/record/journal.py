"""The journal: everything a run says about itself, to its folder, to the person who watches and to other writers.

With several ranks all of them keep one, and the first alone writes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, get_args

import torch

from logitless.distributed.ranks import Ranks
from logitless.train.block import JudgedBlock
from logitless.train.record.live_view import LiveView
from logitless.train.record.memory import peak_memory
from logitless.train.record.metrics import Numbers
from logitless.train.record.run_folder import RunFolder
from logitless.train.record.wall_clock import WallClock
from logitless.train.record.writers import Writer
from logitless.types import VerdictStatus


class Journal:
    """Metrics, rollouts, the seconds of each phase, the summary, the live view.

    Args:
        folder: of the run.
        view: what the user sees.
        writers: other places that metrics go to.
        device: whose peak memory is written.
        ranks: of the run; the peak is that of the rank with the most.
        clock: of the run; None for one that begins here.
    """

    def __init__(
        self,
        folder: RunFolder,
        view: LiveView,
        writers: Sequence[Writer],
        device: torch.device,
        ranks: Ranks = Ranks.alone(),
        clock: WallClock | None = None,
    ) -> None:
        self._ranks = ranks
        self.folder, self._view, self._writers, self._device = folder, view, writers, device
        self.clock = clock or WallClock()
        self.summary: dict[str, Any] = {}
        self._lines = 0
        self._sample: tuple[str, str, float] | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[list[float]]:
        """Show what is being done and time it; its seconds, compilations left out, are in the list afterwards."""
        self._view.phase(name)
        with self.clock.phase(name) as seconds:
            yield seconds

    def write(self, record: Numbers, by_rank: Mapping[str, Sequence[int]] = MappingProxyType({})) -> None:
        """One line of metrics, and the same to the view and the writers.

        Args:
            record: of a step.
            by_rank: metrics that are a list, one number a rank; for the line alone.
        """
        record = {
            **record,
            "memory/peak_bytes": self._ranks.max(peak_memory(self._device)),
            "time/elapsed_seconds": sum(self.clock.seconds().values()),
        }
        self._summarize(record)
        self._lines += 1
        if not self._ranks.is_first:
            return
        with self.clock.phase("writing"):
            self.folder.append_metrics({**record, **by_rank})
            for writer in self._writers:
                writer.write(record)
            self._view.update(record, self._sample)

    def _summarize(self, record: Numbers) -> None:
        """Keep the first and the last accuracy and reward, and how many verdicts of each reward failed.

        The first line of a run is from before it trains.
        """
        when = "after" if self._lines else "before"
        kept = {"accuracy": f"accuracy_{when}", "reward_mean": f"held_out_reward_{when}"}
        for number, name in kept.items():
            if f"evaluation/{number}" in record:
                self.summary[name] = record[f"evaluation/{number}"]
        for name in record:
            start, _, rest = name.partition("/")
            held_out, _, number = rest.partition("/")
            if start == "held_out" and number in kept:
                self.summary[f"{kept[number]}/{held_out}"] = record[name]
            if start == "verdict" and number in get_args(VerdictStatus):
                self._count(f"verdicts/{held_out}", record[name])
                self._count(f"failed_verdicts/{held_out}", record[name] if number in ("error", "timeout") else 0)
        if "reward/mean" in record:
            self.summary.setdefault("reward_first_block", record["reward/mean"])
            self.summary["reward_last_block"] = record["reward/mean"]

    def _count(self, name: str, number: float) -> None:
        self.summary[name] = self.summary.get(name, 0) + number

    def write_rollouts(
        self, number: int, block: JudgedBlock, advantages: Sequence[Sequence[float | None]] | None = None
    ) -> None:
        """Every completion of a block with what was said of it; one that is trained on becomes the view's sample.

        Args:
            number: of the block, from 1.
            block: everything that was drawn.
            advantages: one a completion, by group; None where the block is not trained on.
        """
        rewards = [reward for group in block.sampled for reward in group.rewards]
        self._count("completions", len(rewards))
        self._count("scored_completions", len(rewards) - rewards.count(None))
        if not self._ranks.is_first:
            return
        with self.clock.phase("writing"):
            self.folder.write_rollouts(number, block.sampled, advantages)
        if advantages is not None:
            first = block.trained[0]
            self._sample = (first.prompt.text, first.completions[0].text, first.rewards[0] or 0.0)

    def first_failures(self, of_rewards: Mapping[str, str]) -> None:
        """Keep the first failure of each reward that has failed, a line each."""
        for name, line in of_rewards.items():
            self.summary.setdefault(f"first_failure/{name}", line)

    @property
    def nothing_scored(self) -> bool:
        """Whether completions were sampled to train on, and not one of them was scored."""
        return self.summary.get("scored_completions") == 0

    def best(self, text: str) -> None:
        """The best evaluation so far, for the person who watches."""
        self._view.best(text)

    def message(self, *lines: str) -> None:
        """Lines for the person who watches."""
        for line in lines:
            self._view.message(line)

    def write_summary(self, run: Mapping[str, Any]) -> None:
        """Leave ``summary.json``.

        Args:
            run: what is known of the run besides the summary so far.
        """
        peak = {"peak_memory_bytes": self._ranks.max(peak_memory(self._device))}
        if self._ranks.is_first:
            self.folder.write_summary({**run, **self.summary, "seconds": self.clock.seconds(), **peak})

    def state_dict(self) -> dict[str, Any]:
        """Lines, seconds and summary so far, as JSON."""
        return {"lines": self._lines, "seconds": self.clock.seconds(), "summary": self.summary}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``; later lines of metrics are removed."""
        self._lines, self.summary = state["lines"], dict(state["summary"])
        self.clock.add(state["seconds"])
        if self._ranks.is_first:
            self.folder.truncate_metrics(self._lines)
