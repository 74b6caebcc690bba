"""The journal: metrics, rollouts and messages of a run, for its folder, the live view and other writers.

Every rank has one; only the first one's writes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch

from logitless.distributed.ranks import Ranks
from logitless.rewards.statistics import by_reward
from logitless.rewards.workers.pooled import hit_deadline
from logitless.train.block import JudgedBlock
from logitless.train.record.live_view import LiveView
from logitless.train.record.memory import peak_memory
from logitless.train.record.metrics import Numbers, without_signal
from logitless.train.record.run_folder import RunFolder
from logitless.train.record.wall_clock import WallClock
from logitless.train.record.writers import Writer


class Journal:
    """Records metrics, rollouts, seconds by phase and the summary, and updates the live view.

    Args:
        writers: further destinations of metrics.
        ranks: of the run; the peak is the largest of all ranks.
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
        self._lines, self._counts_signal = 0, True
        self._sample: tuple[str, str, float] | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[list[float]]:
        """Show and time a phase; the list holds its seconds afterwards, without compilations."""
        self._view.phase(name)
        with self.clock.phase(name) as seconds:
            yield seconds

    def write(self, record: Numbers, by_rank: Mapping[str, Sequence[int]] = MappingProxyType({})) -> None:
        """Write a line of metrics, to the folder, the view and the writers.

        Args:
            by_rank: metrics with a number for each rank; for the folder alone.
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
            self._of_writers(lambda writer: writer.write(record))
            self._view.update(record, self._sample)

    def close_writers(self) -> None:
        """Close the writers."""
        self._of_writers(lambda writer: writer.close())

    def _of_writers(self, call: Callable[[Writer], None]) -> None:
        """Call each writer; one that fails is left out from then on, for a service that is down must end no run."""
        for writer in self._writers:
            try:
                call(writer)
            except Exception as error:
                self._writers = [each for each in self._writers if each is not writer]
                said = f"{type(writer).__name__} failed and gets no further metrics; metrics.jsonl has them all"
                self.message(f"{said}: {type(error).__name__}: {error}")

    def _summarize(self, record: Numbers) -> None:
        """Update the summary: first and last accuracy, reward and share of held-out completions without a score.

        The first line of a run is written before it trains.
        """
        when = "after" if self._lines else "before"
        kept = {
            "accuracy": f"accuracy_{when}",
            "reward_mean": f"held_out_reward_{when}",
            "unscored_fraction": f"unscored_fraction_{when}",
        }
        for number, name in kept.items():
            if f"evaluation/{number}" in record:
                self.summary[name] = record[f"evaluation/{number}"]
        for name in record:
            start, _, rest = name.partition("/")
            held_out, _, number = rest.partition("/")
            if start == "held_out" and number in kept:
                self.summary[f"{kept[number]}/{held_out}"] = record[name]
        if "reward/mean" in record:
            self.summary.setdefault("reward_first_block", record["reward/mean"])
            self.summary["reward_last_block"] = record["reward/mean"]

    def _count(self, name: str, number: float) -> None:
        self.summary[name] = self.summary.get(name, 0) + number

    def write_rollouts(
        self,
        number: int,
        block: JudgedBlock,
        advantages: Sequence[Sequence[float | None]] | None = None,
        *,
        has_signal: bool | None = None,
    ) -> None:
        """Write all completions of a block with verdicts and rewards; the view shows the first that is trained on.

        Args:
            number: of the block, from 1.
            advantages: one a completion, by group; None if the block is not trained on.
            has_signal: whether a token has an advantage; None if the policy does not learn from rewards alone.
        """
        rewards = [reward for group in block.sampled for reward in group.rewards]
        self._count("completions", len(rewards))
        self._count("scored_completions", scored := len(rewards) - rewards.count(None))
        if has_signal is not None and scored and self._counts_signal:
            self._count("blocks_with_signal", has_signal)
        for name, verdicts in by_reward(row for group in block.sampled for row in group.verdicts).items():
            well = [verdict for verdict in verdicts if not verdict.failed]
            self._count(f"verdicts/{name}", len(verdicts))
            self._count(f"failed_verdicts/{name}", len(verdicts) - len(well))
            self._count(f"deadline_hits/{name}", sum(map(hit_deadline, well)))
        if not self._ranks.is_first:
            return
        with self.clock.phase("writing"):
            self.folder.write_rollouts(number, block.sampled, advantages)
        if advantages is not None:
            first = block.trained[0]
            self._sample = (first.prompt.text, first.completions[0].text, first.rewards[0] or 0.0)

    def first_failures(self, of_rewards: Mapping[str, str]) -> None:
        """Add the first failure of each reward to the summary, by the reward's name."""
        for name, line in of_rewards.items():
            self.summary.setdefault(f"first_failure/{name}", line)

    @property
    def no_signal(self) -> bool:
        """``without_signal``, of the blocks so far."""
        return without_signal(self.summary)

    @property
    def nothing_scored(self) -> bool:
        """Whether completions were sampled, and none of them got a score."""
        return self.summary.get("scored_completions") == 0

    def best(self, text: str) -> None:
        """Show the best evaluation so far."""
        self._view.best(text)

    def message(self, *lines: str) -> None:
        """Show lines to the user."""
        for line in lines:
            self._view.message(line)

    def write_summary(self, run: Mapping[str, Any]) -> None:
        """Write ``summary.json``, with further entries."""
        peak = {"peak_memory_bytes": self._ranks.max(peak_memory(self._device))}
        if self._ranks.is_first:
            self.folder.write_summary({**run, **self.summary, "seconds": self.clock.seconds(), **peak})

    def state_dict(self) -> dict[str, Any]:
        """Number of lines, seconds and summary so far, as JSON."""
        return {"lines": self._lines, "seconds": self.clock.seconds(), "summary": self.summary}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``; later lines of metrics are removed, later seconds stay."""
        self._lines, self.summary = state["lines"], dict(state["summary"])
        self._counts_signal = "blocks_with_signal" in self.summary or not self.summary.get("scored_completions")
        self.clock.add(state["seconds"])
        if self._ranks.is_first:
            # The clock of a process that ended by itself ran beyond its checkpoint.
            ended, saved = self.folder.read_summary().get("seconds", {}), state["seconds"]
            self.clock.add({name: max(0.0, ended[name] - saved.get(name, 0.0)) for name in ended})
            self.folder.truncate_metrics(self._lines)
