"""A run whose engine is gone ends with a checkpoint of all that was done, and goes on from it bit for bit."""

from pathlib import Path

import pytest

from logitless.errors import EngineError, LostRankError
from logitless.train.checkpoint import BackgroundSaver, checkpoints, no_room
from logitless.train.engines import Engines, open_engines
from logitless.train.journal import Journal
from logitless.train.metrics import repeatable
from logitless.train.run import start
from tests.train.tiny import tiny_recipe

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


# The calls of a run: load, evaluate; then for each block sample, load, evaluate.
@pytest.mark.parametrize(
    ("calls", "where"), [(5, "sampling block 2"), (6, "pushing after block 2"), (7, "evaluating after block 2")]
)
def test_a_run_whose_engine_is_gone_goes_on_bitwise_from_where_it_was(tmp_path, calls, where):
    whole, _ = start(tiny_recipe(tmp_path, name="whole", **OFTEN))
    stopped = tiny_recipe(tmp_path, name="stopped", **OFTEN)
    with pytest.raises(EngineError, match="a server"):
        start(stopped, open_engines=_unreliable(calls))
    folder, complete = start(stopped, resume=True)
    assert complete
    assert [repeatable(r) for r in whole.read_metrics()] == [repeatable(r) for r in folder.read_metrics()]
    assert list(whole.read_rollouts()) == list(folder.read_rollouts())


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
    monkeypatch.setattr(Journal, "message", lambda self, text: said.append(text))
    plain = BackgroundSaver.save

    def save(saver, *, block, **options):
        if block > 0:
            raise failed
        plain(saver, block=block, **options)

    monkeypatch.setattr(BackgroundSaver, "save", save)
    with pytest.raises(EngineError, match="a server"):
        start(recipe, open_engines=_unreliable(5))
    assert f"no further checkpoint: {failed}" in said
