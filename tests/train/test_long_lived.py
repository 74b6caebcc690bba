"""Objects from before a run are out of the garbage collector's way while it runs."""

import gc
from pathlib import Path

import pytest

from logitless.doctor.forecast import forecast_of
from logitless.train.learn.learner import Learner
from logitless.train.long_lived import startup_objects_frozen
from logitless.train.plan.run_plan import plan_of
from tests.train.interrupting import before
from tests.train.tiny import start, tiny_recipe


def test_a_full_collection_inside_finds_garbage_of_inside_and_looks_at_nothing_from_before() -> None:
    before = [[] for _ in range(100)]
    with startup_objects_frozen():
        assert not any(each is before for each in gc.get_objects())
        inside: list[object] = []
        inside.append(inside)
        del inside
        assert gc.collect() >= 1
    assert any(each is before for each in gc.get_objects())


def test_a_block_inside_another_one_freezes_what_was_made_since_and_the_outer_one_thaws_it() -> None:
    with startup_objects_frozen():
        between = [[] for _ in range(100)]
        with startup_objects_frozen():
            assert not any(each is between for each in gc.get_objects())
        assert not any(each is between for each in gc.get_objects())
    assert any(each is between for each in gc.get_objects())


def test_it_ends_also_where_a_run_fails() -> None:
    with pytest.raises(ValueError, match="no step"), startup_objects_frozen():
        raise ValueError("no step")
    assert gc.get_freeze_count() == 0


def test_what_somebody_has_frozen_before_stays_frozen() -> None:
    gc.freeze()
    try:
        with startup_objects_frozen():
            pass
        assert gc.get_freeze_count() > 0  # some of them may have died meanwhile
    finally:
        gc.unfreeze()
    with startup_objects_frozen():
        with startup_objects_frozen():
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["run", "forecast"])
def test_steps_are_made_inside(whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []
    before(monkeypatch, Learner, "step", lambda _: frozen.append(gc.get_freeze_count()))
    recipe = tiny_recipe(tmp_path, train__blocks=1)
    if whose == "run":
        start(recipe)
    else:
        forecast_of(recipe, plan_of(recipe))
    assert frozen
    assert min(frozen) > 100_000  # of torch and transformers
    assert gc.get_freeze_count() == 0
