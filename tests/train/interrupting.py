"""Ctrl-C, or another signal, at a chosen moment of a run."""

import signal
from collections.abc import Callable
from typing import Any

import pytest

from logitless.train.recipe.config import Recipe
from logitless.train.record.live_view import LiveView
from logitless.train.record.run_folder import RunFolder
from tests.train.tiny import start


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


def stopped_at(step: int, recipe: Recipe, number: int = signal.SIGINT, **options: Any) -> RunFolder:
    """The folder of a run of the recipe that a signal stopped at that step."""
    with pytest.MonkeyPatch.context() as patched:
        stop_at(step, patched, number)
        folder, complete = start(recipe, **options)
    assert not complete
    return folder


def before(monkeypatch, owner: object, name: str, do: Callable[..., object]) -> None:
    """Do something with the arguments of each call of a function, before the call."""
    plain = getattr(owner, name)

    def called(*arguments, **options):
        do(*arguments, **options)
        return plain(*arguments, **options)

    monkeypatch.setattr(owner, name, called)
