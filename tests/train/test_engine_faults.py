"""A run whose engine is gone ends with a checkpoint of all that was done, and goes on from it bit for bit."""

from pathlib import Path

import pytest
import torch

from logitless.errors import EngineError, LostRankError
from logitless.train.assembly.engines import Engines, open_engines
from logitless.train.record.journal import Journal
from logitless.train.record.run_folder import RunFolder
from logitless.train.run import start
from logitless.train.store.checkpoint import BackgroundSaver, checkpoints, no_room
from tests.train.tiny import assert_same_run, tiny_recipe

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
    torch.use_deterministic_algorithms(True)  # as every test has it
    return start(tiny_recipe(tmp_path_factory.mktemp("whole"), **OFTEN))[0]


# The calls of a run: load, evaluate; then for each block sample, load, evaluate.
@pytest.mark.parametrize("calls", [5, 6, 7], ids=["sampling block 2", "loading after it", "evaluating after it"])
def test_a_run_whose_engine_is_gone_goes_on_bitwise_from_where_it_was(whole, tmp_path, calls):
    recipe = tiny_recipe(tmp_path, **OFTEN)
    with pytest.raises(EngineError, match="a server"):
        start(recipe, open_engines=_unreliable(calls))
    folder, complete = start(recipe, resume=True)
    assert complete
    assert_same_run(whole, folder)


def test_an_engine_that_was_never_there_leaves_no_checkpoint(tmp_path):
    recipe = tiny_recipe(tmp_path)
    with pytest.raises(EngineError):
        start(recipe, open_engines=_unreliable(0))
    assert not list((tmp_path / "runs").glob("*/checkpoints/*")) or not checkpoints(
        next((tmp_path / "runs").glob("*/checkpoints"))
    )


FULL = no_room(Path("checkpoints"), "No space left on device")
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
