"""Benchmarks of settings: every contender is measured or has its reason, and the fastest becomes recipe lines."""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from logitless.bench import recommended, settings
from logitless.bench.settings import Contender, Scale, SettingBenchmark, Step, Timing, best_lines, measured
from logitless.cli.main import main
from logitless.doctor.machine import left_on_the_table, takes_row_invariant_layers
from logitless.train.plan.run_plan import plan_of
from logitless.train.recipe.config import Recipe
from tests.train.tiny import tiny_raw, tiny_recipe

TINY = Scale(0, 2, 5.0, 16, 1, 1, 16, 8, (8,), (8,), 16, 2, (8, 16))


def slept(seconds: float) -> Step:
    import time

    return lambda: time.sleep(seconds)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "QUICK", TINY)


@pytest.mark.parametrize(
    "name",
    [
        "sampling",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("attention", "precision", "optimizer", "layers")),
    ],
)
def test_a_quick_look_prints_and_keeps_every_contender(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", name, "--quick", "--device", "cpu", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert found["quick"] is True
    assert all((row["seconds"] is None) == (row["failure"] is not None) for row in found["rows"])
    assert any(row["seconds"] for row in found["rows"])
    assert all(row["name"] in out for row in found["rows"])
    assert all(line in out for line in found["recommended"])
    assert (tmp_path / f"{name}.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("name", ["precision", "attention", "compile", "layers", "optimizer"])
def test_lines_that_rule_out_row_invariant_layers_say_so(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark: SettingBenchmark = getattr(settings, name.upper())
    timed = [Contender(f"{ms} ms", partial(slept, ms / 1000), (f"a: {ms}",)) for ms in (1, 9)]
    benchmark = replace(benchmark, contenders=lambda *_: iter(timed))
    parser = argparse.ArgumentParser()
    benchmark.add_arguments(parser)
    benchmark.run(parser.parse_args(["--quick", "--device", "cpu", "--out", str(tmp_path)]))
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("in a recipe")]
    assert ("rule out row-invariant" in line) == (name in ("precision", "attention", "compile"))


def test_a_training_step_keeps_no_cache_of_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one each layer is compiled anew, for each has its own entry, and from the ninth on none is compiled."""
    made = list[object]()
    monkeypatch.setattr("transformers.cache_utils.DynamicCache.__init__", lambda cache, *_, **__: made.append(cache))
    scale = settings.QUICK
    settings._training(settings._model(scale, "cpu"), scale, "cpu")()
    assert not made


def test_the_median_step_is_reported_with_its_tokens() -> None:
    row = measured(Contender("sleeper", lambda: slept(0.02)), TINY, "cpu", 100)
    assert row.seconds is not None
    assert row.seconds >= 0.02
    assert row.tokens_per_second == 100 / row.seconds
    assert row.peak_bytes is None


def test_a_contender_that_cannot_run_has_its_reason() -> None:
    def absent() -> Step:
        raise ImportError("No module named 'somebody'")

    row = measured(Contender("absent", absent), TINY, "cpu", None)
    assert (row.seconds, row.failure) == (None, "No module named 'somebody'")


def test_steps_end_with_the_seconds() -> None:
    calls: list[int] = []
    scale = Scale(**{**TINY.__dict__, "steps": 1000, "seconds": 0.0})
    measured(Contender("counted", lambda: lambda: calls.append(1)), scale, "cpu", None)
    assert len(calls) == 1


PLAIN = ("plain", "", 1.0, "setting: plain")


@pytest.mark.parametrize(
    ("measured_rows", "recommended_lines"),
    [
        ([PLAIN, ("fast", "", 0.5, "setting: fast")], ["setting: fast"]),
        ([PLAIN, ("nearly as fast", "", 0.96, "setting: other")], ["setting: plain"]),  # the simplest within 5%
        ([PLAIN, ("faster", "", 0.94, "setting: other")], ["setting: other"]),
        ([PLAIN, ("no recipe has it", "", 0.1), ("b", "", 0.5, "setting: b")], ["setting: b"]),
        ([("a", "128", 1.0, "a: 1"), ("b", "512", 3.0, "b: 1"), ("c", "512", 2.0, "c: 1")], ["c: 1"]),  # the last case
        ([PLAIN], []),  # no choice
        ([PLAIN, ("absent", "", None, "setting: absent")], []),
    ],
    ids=str,
)
def test_the_fastest_setting_that_a_recipe_can_have_is_recommended(
    measured_rows: list[tuple[Any, ...]], recommended_lines: list[str]
) -> None:
    rows = [
        Timing(name, case, seconds, None, None, None, tuple(lines)) for name, case, seconds, *lines in measured_rows
    ]
    assert best_lines(rows) == recommended_lines


def test_doctor_prints_lines_of_this_machine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(recommended.FOLDER, str(tmp_path))
    assert recommended.recommended_here() == []
    assert main(["bench", "optimizer", "--quick", "--device", "cpu", "--out", str(tmp_path)]) == 0
    ((name, line),) = recommended.recommended_here()
    assert name == "optimizer"
    assert line.startswith("train.optimizer.implementation: ")
    path = tmp_path / "optimizer.json"
    path.write_text(path.read_text().replace('"gpu": "none"', '"gpu": "another"'))
    assert recommended.recommended_here() == []
    path.write_text("{half")
    assert recommended.recommended_here() == []


Recommend = Callable[..., None]


@pytest.fixture
def recommend(monkeypatch: pytest.MonkeyPatch) -> Recommend:
    """Makes pairs of a benchmark and a recipe line those that were measured on this machine."""

    def lines(*pairs: tuple[str, str]) -> None:
        monkeypatch.setattr("logitless.doctor.machine.recommended_here", lambda: list(pairs))

    return lines


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes are checked as on a GPU."""
    monkeypatch.setattr("logitless.doctor.machine.device_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (2**37, 2**37))


def left(recipe: Recipe) -> list[str]:
    return left_on_the_table(recipe, plan_of(recipe))


def test_doctor_leaves_out_a_line_that_the_recipe_has(tmp_path: Path, recommend: Recommend) -> None:
    lines = [("optimizer", "train.optimizer.implementation: fused"), ("attention", "model.sdpa_backends: [flash]")]
    recommend(*lines)
    assert left(tiny_recipe(tmp_path)) == [f"{line} — bench {name}" for name, line in lines]
    has = {"train__optimizer__implementation": "fused", "model__sdpa_backends": ["flash"]}
    assert left(tiny_recipe(tmp_path, **has)) == []


@pytest.mark.parametrize(("name", "left_out"), [("foreach", True), ("loop", False)])
def test_doctor_leaves_out_what_auto_is_here(tmp_path: Path, recommend: Recommend, name: str, left_out: bool) -> None:
    recommend(("optimizer", f"train.optimizer.implementation: {name}"))
    assert (left(tiny_recipe(tmp_path)) == []) is left_out


def test_doctor_leaves_out_lines_that_would_rule_out_row_invariant_layers(
    tmp_path: Path, recommend: Recommend, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        ("attention", "model.attention: sdpa"),
        ("attention", "model.sdpa_backends: [cudnn]"),
        ("precision", "model.autocast: bfloat16"),
        ("compile", "model.compile: true"),
        ("layers", "model.layers: transformers"),
        ("optimizer", "train.optimizer.implementation: fused"),
    ]
    recommend(*lines)
    recipe = tiny_recipe(tmp_path)
    assert len(left(recipe)) == len(lines)
    monkeypatch.setattr("logitless.doctor.machine.takes_row_invariant_layers", lambda *_: True)
    assert left(recipe) == ["train.optimizer.implementation: fused — bench optimizer"]


@pytest.mark.usefixtures("hopper")
def test_doctor_leaves_them_out_too_where_only_a_dtype_keeps_these_layers_away(
    tmp_path: Path, recommend: Recommend
) -> None:
    pytest.importorskip("triton")
    source = tiny_raw(tmp_path)["model"]["source"] | {"hidden_size": 64, "intermediate_size": 64}
    line = "model.autocast: bfloat16"
    recommend(("precision", line))
    assert left(tiny_recipe(tmp_path, model__source=source)) == []
    assert left(tiny_recipe(tmp_path, model__source=source, model__attention="sdpa")) == [f"{line} — bench precision"]


def test_rows_are_recommended_where_there_is_room_and_once(
    tmp_path: Path, recommend: Recommend, monkeypatch: pytest.MonkeyPatch
) -> None:
    recommend(("sampling", "rollout.max_rows: 8"))
    few, all_ = tiny_recipe(tmp_path, rollout__max_rows=4), tiny_recipe(tmp_path, rollout__max_rows=16)
    assert left(few) == ["rollout.max_rows: 8 — bench sampling"]
    assert left(all_) == []
    monkeypatch.setattr("logitless.doctor.machine.free_memory", lambda _: 3 * plan_of(few).total_bytes)
    assert left(few) == []


def test_doctor_prints_the_warnings_of_a_run(tmp_path: Path, recommend: Recommend) -> None:
    recommend(("optimizer", "train.optimizer.implementation: fused"))
    recipe = tiny_recipe(tmp_path)
    plan = replace(plan_of(recipe), warnings=("WARNING: slow",))
    assert left_on_the_table(recipe, plan) == [
        "WARNING: slow",
        "train.optimizer.implementation: fused — bench optimizer",
    ]


@pytest.mark.usefixtures("hopper")
def test_row_invariant_layers_are_taken_on_a_gpu_for_bfloat16_weights_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    source = tiny_raw(tmp_path)["model"]["source"] | {"hidden_size": 64, "intermediate_size": 64}
    bfloat16, gpu = {"model__trained_dtype": "bfloat16"}, torch.device("cuda")
    lowered = tiny_recipe(tmp_path, model__source=source, **bfloat16)
    assert takes_row_invariant_layers(lowered, gpu)
    assert not takes_row_invariant_layers(lowered, torch.device("cpu"))
    assert not takes_row_invariant_layers(tiny_recipe(tmp_path, model__source=source), gpu)
    own = tiny_recipe(tmp_path, model__source=source, model__layers="transformers", **bfloat16)
    assert not takes_row_invariant_layers(own, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert not takes_row_invariant_layers(lowered, gpu)
