"""A writer gets the finite numbers of each record at their step; an absent package stops it before it starts."""

import math
import sys
from types import ModuleType

import pytest

from logitless.errors import UnavailableError
from logitless.train.writers import open_writers

RECORD = {"step": 3, "reward/mean": 0.5, "kl_ref/k3_mean": None, "optimizer/grad_norm": math.inf}


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_back_what_was_written(tmp_path):
    (writer,) = open_writers(["tensorboard"], folder=tmp_path, run_name="toy", config={})
    writer.write(RECORD)
    writer.close()
    assert scalars(tmp_path / "tensorboard") == {"reward/mean": [(3, 0.5)]}


def test_a_resumed_run_hides_what_the_interrupted_one_wrote_after_the_checkpoint(tmp_path):
    for first_step, steps, value in [(0, range(1, 6), 0.25), (3, range(4, 6), 0.75)]:
        (writer,) = open_writers(["tensorboard"], folder=tmp_path, run_name="toy", config={}, first_step=first_step)
        for step in steps:
            writer.write({"step": step, "reward/mean": value})
        writer.close()
    points = scalars(tmp_path / "tensorboard")["reward/mean"]
    assert sorted(points) == [(1, 0.25), (2, 0.25), (3, 0.25), (4, 0.75), (5, 0.75)]


@pytest.mark.parametrize("service", ["wandb", "trackio"])
def test_a_service_gets_the_name_the_recipe_and_each_step(monkeypatch, tmp_path, service):
    calls = []
    module = ModuleType(service)
    module.init = lambda **options: calls.append(("init", options))
    module.log = lambda numbers, step: calls.append(("log", numbers, step))
    module.finish = lambda: calls.append(("finish",))
    monkeypatch.setitem(sys.modules, service, module)
    (writer,) = open_writers([service], folder=tmp_path, run_name="toy", config={"seed": 1})
    writer.write(RECORD)
    writer.close()
    init = calls[0][1]
    assert (init["project"], init["name"], init["config"]) == ("logitless", "toy", {"seed": 1})
    assert calls[1:] == [("log", {"reward/mean": 0.5}, 3), ("finish",)]


@pytest.mark.parametrize("service", ["wandb", "trackio"])
def test_an_absent_package_is_named_before_any_writer_starts(monkeypatch, tmp_path, service):
    monkeypatch.setitem(sys.modules, service, None)
    with pytest.raises(UnavailableError, match=f"pip install {service}"):
        open_writers(["tensorboard", service], folder=tmp_path, run_name="toy", config={})
    assert not list(tmp_path.iterdir())
