"""The live view of a run on a terminal, or plain lines where there is none.

It reads the metrics of each step and nothing else. On a terminal another thread draws it at any time, also during an
update, so that its attributes are replaced and never changed in place.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from logitless.train.record.metrics import Record, not_scored

logger = logging.getLogger("logitless")
_BARS = "▁▂▃▄▅▆▇█"
_KEPT = 48
_SHOWN = (
    ("loss/total", "loss"),
    ("reward/mean", "reward"),
    ("teacher/divergence", "divergence from the teacher"),
    ("teacher/log_ratio", "log ratio to the teacher"),
    ("kl_ref/k3_mean", "KL"),
    ("entropy/mean", "entropy"),
    ("length/mean", "length"),
    ("value/explained_variance", "explained variance"),
    ("evaluation/accuracy", "held-out accuracy"),
)
_MAX_SAMPLE_CHARACTERS = 400


def sparkline(values: Sequence[float | int]) -> str:
    """Values as a row of bars; a value that is not finite is a gap.

    Example:
        >>> sparkline([0.0, 0.5, 1.0])
        '▁▅█'
        >>> sparkline([2.0, float("nan"), 2.0])
        '▁ ▁'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low, span = min(finite), max(finite) - min(finite)
    scale = (len(_BARS) - 1) / span if span > 0 else 0.0
    return "".join(_BARS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values)


def duration(seconds: float | int) -> str:
    """A duration in words.

    Example:
        >>> duration(42.2), duration(62), duration(3720)
        ('42 s', '1 min 02 s', '1 h 02 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole // 60 % 60:02d} min"


class _LinesOf(logging.Handler):
    """Shows log lines in the view: written beside it, the next drawing would cover them."""

    def __init__(self, view: "LiveView") -> None:
        super().__init__()
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        self._view.message(self.format(record))


class LiveView:
    """Shows progress, remaining time, curves and a sample completion; a context manager.

    The remaining time is estimated from the blocks since start or resume, without the first, which compiles kernels.

    Args:
        total_blocks: blocks of the whole run.
        first_block: blocks that were done before a resume.
        silent: show nothing, because another rank does.
        shows_loss: whether the loss says how far the run is (``Recipe.imitates``).
        console: a terminal gets the live view, anything else one plain line an update.

    Example:
        >>> import io
        >>> out = io.StringIO()
        >>> with LiveView(10, title="toy", console=Console(file=out, width=80)) as view:
        ...     view.phase("rollout")
        ...     view.update({"step": 1, "block": 1, "reward/mean": 0.25}, sample=None)
        ...     view.message("saved")
        >>> print(out.getvalue(), end="")
        toy: 10 blocks
        block 1/10  step 1  reward 0.25
        saved
    """

    def __init__(
        self,
        total_blocks: int,
        *,
        first_block: int = 0,
        silent: bool = False,
        title: str = "run",
        shows_loss: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_blocks, self.title = total_blocks, title
        self._shown = _SHOWN if shows_loss else _SHOWN[1:]
        self.console = Console(quiet=True, force_terminal=False) if silent else console or Console()
        self._clock = clock
        self._block_ends: dict[int, float] = {}
        self._block = first_block
        self._history: dict[str, tuple[float | int, ...]] = {}
        self._record: Record = {}
        self._failing: list[str] = []
        self._sample: tuple[str, str, float | int] | None = None
        self._best: str | None = None
        self._phase = "starting"
        self._phase_start = clock()
        self._live: Live | None = None
        self._log = _LinesOf(self)

    def __enter__(self) -> "LiveView":
        if self.console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4)
            self._live.start()
            logger.addHandler(self._log)
            logger.propagate = False
        else:
            self._say(f"{self.title}: {self.total_blocks} blocks")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            logger.propagate = True
            logger.removeHandler(self._log)
            self._phase = "done" if kind is None else "stopped"
            self._live.stop()
            self._live = None

    def phase(self, name: str) -> None:
        """Show the current phase: ``rollout``, ``scoring``, ..."""
        self._phase, self._phase_start = name, self._clock()

    def update(self, record: Record, sample: tuple[str, str, float | int] | None) -> None:
        """Show the metrics of a step, and (prompt, completion, reward) if there is a new sample."""
        self._record = record
        self._sample = sample or self._sample
        self._block = int(record["block"] or 0)
        if "reward/mean" in record:  # the first line of a block; later lines do not have verdicts
            self._failing = _failing(record)
        self._block_ends = self._block_ends | {self._block: self._clock()}
        self._shown = tuple(dict.fromkeys((*self._shown, *_accuracies(record))))
        for name, _ in self._shown:
            if name in record:
                value = record[name]
                self._history[name] = (*self._history.get(name, ()), math.nan if value is None else value)[-_KEPT:]
        if self._live is None and any(record.get(name) is not None for name, _ in self._shown):
            self._say(self._line())

    def best(self, text: str) -> None:
        """Show the best evaluation so far."""
        self._best = text

    def message(self, text: str) -> None:
        """Print a line that stays on the screen."""
        self._say(text)

    def seconds_left(self) -> float | None:
        """Estimated seconds to the end of the run; None before two blocks are done."""
        ends = self._block_ends
        done = sorted(block for block in ends if block < self._block)
        if len(done) < 2:
            return None
        first, last = done[0], done[-1]
        pace = (ends[last] - ends[first]) / (last - first)
        return max(0.0, ends[last] + pace * (self.total_blocks - last) - self._clock())

    def _say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def _line(self) -> str:
        before = self._record["step"] == 0 and "reward/mean" not in self._record
        now = [f"block {self._block}/{self.total_blocks}", f"step {self._record['step']:.0f}"]
        parts = ["before training"] if before else now
        for name, label in self._shown:
            value = self._record.get(name)
            if value is not None:
                parts.append(f"{label} {_short(name, value)}{_unscored(name, self._record)}")
        parts += self._failing if "reward/mean" in self._record else ()
        if self._best is not None and any(name.startswith(("evaluation/", "held_out/")) for name in self._record):
            parts.append(f"best {self._best}")
        left = self.seconds_left()
        return "  ".join(parts if left is None else [*parts, f"{duration(left)} left"])

    def _render(self) -> Panel:
        left = self.seconds_left()
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        head.add_row(
            f"block {self._block}/{self.total_blocks}",
            ProgressBar(total=self.total_blocks, completed=self._block),
            "" if left is None else f"{duration(left)} left",
        )
        curves = Table.grid(padding=(0, 2))
        for _ in range(3):
            curves.add_column(no_wrap=True)
        for name, label in self._shown:
            if name in self._history:
                values = self._history[name]
                curves.add_row(
                    Text(label), Text(_short(name, values[-1]), style="bold"), Text(sparkline(values), "cyan")
                )
        parts: list[Table | Text] = [head, curves]
        if self._best is not None:
            parts.append(Text(f"best {self._best}", style="bold"))
        if self._failing:
            parts.append(Text("\n".join(self._failing), style="bold red"))
        if self._sample is not None:
            prompt, completion, reward = self._sample
            sample = Text(f"\nreward {reward:.3g}  ", style="dim")
            sample.append(_shortened(prompt), style="dim")
            sample.append(_shortened(completion), style="green" if reward > 0 else "yellow")
            parts.append(sample)
        now = f"{self._phase} {duration(self._clock() - self._phase_start)}"
        return Panel(Group(*parts), title=Text(self.title), subtitle=Text(now), title_align="left")


def _short(name: str, value: float | int) -> str:
    """A value that is shown; reward and accuracy are NaN if no completion was scored."""
    scored = math.isfinite(value) or not (name == "reward/mean" or name.endswith("/accuracy"))
    return f"{value:.4g}" if scored else "not scored"


def _unscored(name: str, record: Record) -> str:
    """How many held-out completions have no score, beside the accuracy that counts them as wrong."""
    start, _, number = name.rpartition("/")
    return not_scored(record.get(f"{start}/unscored_fraction") or 0.0) if number == "accuracy" else ""


def _failing(record: Record) -> list[str]:
    """The rewards that failed in a block, with the share of completions that they failed at."""
    return [
        f"{name.split('/')[1]} failed at {share:.0%}"
        for name, share in record.items()
        if share and name.startswith("verdict/") and name.endswith("/failed_fraction")
    ]


def _accuracies(record: Record) -> list[tuple[str, str]]:
    """The accuracies of the sets of ``evaluation.sets``, each with its label."""
    sets = (name.split("/") for name in record if name.startswith("held_out/") and name.endswith("/accuracy"))
    return [("/".join(name), f"{name[1]} accuracy") for name in sets]


def _shortened(text: str) -> str:
    """The end of a long text, with control characters replaced, which would move the cursor."""
    shown = text if len(text) <= _MAX_SAMPLE_CHARACTERS else "…" + text[-_MAX_SAMPLE_CHARACTERS:]
    return "".join(letter if letter.isprintable() or letter == "\n" else "�" for letter in shown)
