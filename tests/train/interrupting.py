"""Ctrl-C, or another signal, at a chosen moment of a run."""

import signal

from logitless.train.live_view import LiveView


def stop_at(step: int, monkeypatch, number: int = signal.SIGINT) -> None:
    """Raise the signal once when the metrics of that step are shown."""
    plain = LiveView.update

    def update(self, record, sample):
        plain(self, record, sample)
        if record["step"] == step:
            signal.raise_signal(number)

    monkeypatch.setattr(LiveView, "update", update)
