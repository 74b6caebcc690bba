"""A run whose engine is gone ends with a checkpoint of all that was done, and goes on from it bit for bit."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from logitless.errors import CheckpointError, EngineError, LostRankError, TrainingError
from logitless.train.assembly.engines import Engines, open_engines
from logitless.train.record.journal import Journal
from logitless.train.record.run_folder import RunFolder
from logitless.train.store.atomic import cannot_write
from logitless.train.store.checkpoint import BackgroundSaver, checkpoints
from tests.train.tiny import assert_same_run, finished_run, start, tiny_recipe

OFTEN = {"evaluation__every_blocks": 1, "checkpoint__every_blocks": 100}


class Unreliable:
    """An engine that is gone from the n-th call on.

    Args:
        inner: samples.
        calls: of ``sample`` and ``load`` that it lives through.
    """

    def __init__(self, inner, calls):
        self.inner, self.left = inner, calls

    def _live(self):
        self.left -= 1
        if self.left < 0:
            raise EngineError(needed="a server", given="none", remedy="Start it.")

    def sample(self, *arguments, **options):
        self._live()
        return self.inner.sample(*arguments, **options)

    def load(self, weights, version):
        self._live()
        self.inner.load(weights, version)

    def close(self):
        self.inner.close()


def _unreliable(calls):
    def opening(*arguments):
        engine = Unreliable(open_engines(*arguments).training, calls)
        return Engines(engine, engine)

    return opening


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> RunFolder:
    return finished_run(tmp_path_factory.mktemp("whole"), **OFTEN)


# The calls of a run: load, evaluate; then for each block sample, load, evaluate.
@pytest.mark.parametrize(
    "calls",
    [5, pytest.param(6, marks=pytest.mark.slow), 7],
    ids=["sampling block 2", "loading after it", "evaluating after it"],
)
def test_a_run_whose_engine_is_gone_goes_on_bitwise_from_where_it_was(whole, tmp_path, calls):
    with pytest.raises(EngineError, match="a server"):
        start(tiny_recipe(tmp_path, **OFTEN), open_engines=_unreliable(calls))
    assert_same_run(whole, finished_run(tmp_path, resume=True, **OFTEN))


def test_an_engine_that_was_never_there_leaves_no_checkpoint(tmp_path):
    recipe = tiny_recipe(tmp_path)
    with pytest.raises(EngineError):
        start(recipe, open_engines=_unreliable(0))
    assert not list((tmp_path / "runs").glob("*/checkpoints/*")) or not checkpoints(
        next((tmp_path / "runs").glob("*/checkpoints"))
    )


@pytest.mark.parametrize(
    ("name", "error"), [("sample", EngineError), ("load", TrainingError)], ids=["sampling", "loading"]
)
def test_an_exception_of_an_engine_names_it_and_shows_where_it_was_raised(name, error, tmp_path, monkeypatch):
    def broken(*arguments, **options):
        raise KeyError("no such weights")

    monkeypatch.setattr(Unreliable, name, broken)
    with pytest.raises(error) as caught:
        start(tiny_recipe(tmp_path), open_engines=_unreliable(100))
    said = str(caught.value)
    assert f"Unreliable.{name} (rollout.engine); given KeyError: 'no such weights'. Correct it:" in said
    assert said.splitlines()[-1].strip() == 'raise KeyError("no such weights")'
    assert f"{__file__}" in said.splitlines()[-2]
    assert "own_code.py" not in said


def test_a_batch_that_is_too_large_is_not_the_engines_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(Unreliable, "sample", mock.Mock(side_effect=torch.OutOfMemoryError("of the GPU")))
    with pytest.raises(torch.OutOfMemoryError):
        start(tiny_recipe(tmp_path), open_engines=_unreliable(100))


def _says_versions(monkeypatch, said):
    """Completions say that these weights sampled them; ``mixed``: the first ones, and later ones the last token."""
    plain = Unreliable.sample
    versions = {"weights_version": 0 if said == "mixed" else said}

    def of(completion):
        mixed = {"token_versions": [0] * (completion.length - 1) + [1]} if said == "mixed" else {}
        return replace(completion, **versions, **mixed)

    def sample(self, *arguments, **options):
        return [[of(c) for c in group] for group in plain(self, *arguments, **options)]

    monkeypatch.setattr(Unreliable, "sample", sample)


@pytest.mark.parametrize("said", [None, 1, "mixed"])
def test_completions_of_weights_that_the_engine_was_not_given_end_the_run(said, tmp_path, monkeypatch):
    _says_versions(monkeypatch, said)
    given = "None" if said is None else "1"
    with pytest.raises(EngineError, match=f"given with `load`, at most 0; given {given} of a completion of prompt"):
        start(tiny_recipe(tmp_path), open_engines=_unreliable(100))


def test_completions_of_older_weights_are_trained_on(tmp_path, monkeypatch):
    _says_versions(monkeypatch, 0)
    finished_run(tmp_path, open_engines=_unreliable(100))


FULL = cannot_write(Path("checkpoints"), "No space left on device", CheckpointError)
GONE = LostRankError(needed="all 2 ranks", given="without rank 1", remedy="Look at it.")


@pytest.mark.parametrize("failed", [FULL, GONE], ids=["full disk", "rank that left"])
def test_where_no_checkpoint_can_be_saved_either_the_engine_is_still_what_the_run_ends_with(
    failed, tmp_path, monkeypatch
):
    recipe, said = tiny_recipe(tmp_path, **OFTEN), []
    monkeypatch.setattr(Journal, "message", lambda self, *lines: said.extend(lines))
    plain = BackgroundSaver.save

    def save(saver, *, block, **options):
        if block > 0:
            raise failed
        plain(saver, block=block, **options)

    monkeypatch.setattr(BackgroundSaver, "save", save)
    with pytest.raises(EngineError, match="a server"):
        start(recipe, open_engines=_unreliable(5))
    assert f"no further checkpoint: {failed}" in said
