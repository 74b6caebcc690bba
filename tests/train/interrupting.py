"""Ctrl-C, or another signal, at a chosen moment of a run."""

import signal
from collections.abc import Callable

from logitless.train.record.live_view import LiveView


def at_step(step: int, monkeypatch, do: Callable[[], object]) -> None:
    """Do something when the metrics of that step are shown."""
    plain = LiveView.update

    def update(self, record, sample):
        plain(self, record, sample)
        if record["step"] == step:
            do()

    monkeypatch.setattr(LiveView, "update", update)


def stop_at(step: int, monkeypatch, number: int = signal.SIGINT) -> None:
    """Raise the signal at that step."""
    at_step(step, monkeypatch, lambda: signal.raise_signal(number))
