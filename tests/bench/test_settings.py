"""Benchmarks of settings: every contender is measured or has its reason, and the fastest becomes recipe lines."""

import json
from pathlib import Path

import pytest
import torch

from logitless.bench import recommended, settings
from logitless.bench.settings import Contender, Row, Scale, Step, best_lines, measured
from logitless.cli.main import main
from logitless.doctor.machine import left_on_the_table, takes_row_invariant_layers
from logitless.train.plan.run_plan import plan_of
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


def test_the_fastest_that_a_recipe_can_name_is_recommended_of_the_longest_case() -> None:
    def row(name: str, case: str, seconds: float | None, *lines: str) -> Row:
        return Row(name, case, seconds, None, None, None if seconds else "absent", lines)

    rows = [row("a", "128", 1.0, "a: 1"), row("b", "512", 3.0, "b: 1"), row("c", "512", 2.0, "c: 1")]
    assert best_lines([*rows, row("fast", "512", 1.0), row("gone", "512", None, "gone: 1")]) == ["c: 1"]
    assert best_lines([row("gone", "", None, "gone: 1")]) == []


def test_a_difference_that_may_be_chance_does_not_recommend_more_than_the_plainest() -> None:
    def row(name: str, seconds: float) -> Row:
        return Row(name, "", seconds, None, None, None, (f"setting: {name}",))

    assert best_lines([row("plain", 1.04), row("fancy", 1.0)]) == ["setting: plain"]
    assert best_lines([row("plain", 1.06), row("fancy", 1.0)]) == ["setting: fancy"]


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


def test_doctor_leaves_out_a_line_that_the_recipe_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [("optimizer", "train.optimizer.implementation: fused"), ("attention", "model.sdpa_backends: [flash]")]
    monkeypatch.setattr("logitless.doctor.machine.recommended_here", lambda: lines)
    plain = tiny_recipe(tmp_path)
    assert left_on_the_table(plain, plan_of(plain)) == [f"{line} — bench {name}" for name, line in lines]
    has = tiny_recipe(tmp_path, train__optimizer__implementation="fused", model__sdpa_backends=["flash"])
    assert left_on_the_table(has, plan_of(has)) == []


def test_doctor_leaves_out_what_auto_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(tmp_path)
    for name, left_out in (("foreach", True), ("loop", False)):
        line = ("optimizer", f"train.optimizer.implementation: {name}")
        monkeypatch.setattr("logitless.doctor.machine.recommended_here", lambda line=line: [line])
        assert (left_on_the_table(recipe, plan_of(recipe)) == []) is left_out


def test_doctor_leaves_out_lines_that_would_cost_one_set_of_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        ("attention", "model.attention: sdpa"),
        ("attention", "model.sdpa_backends: [cudnn]"),
        ("precision", "model.autocast: bfloat16"),
        ("compile", "model.compile: true"),
        ("layers", "model.layers: liger"),
        ("optimizer", "train.optimizer.implementation: fused"),
    ]
    monkeypatch.setattr("logitless.doctor.machine.recommended_here", lambda: lines)
    recipe = tiny_recipe(tmp_path)
    assert len(left_on_the_table(recipe, plan_of(recipe))) == len(lines)
    monkeypatch.setattr("logitless.doctor.machine.takes_row_invariant_layers", lambda *_: True)
    assert left_on_the_table(recipe, plan_of(recipe)) == ["train.optimizer.implementation: fused — bench optimizer"]


def test_doctor_names_the_dtype_that_row_invariant_layers_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("logitless.doctor.machine.recommended_here", list)
    monkeypatch.setattr("logitless.doctor.machine.device_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (2**37, 2**37))
    source = tiny_raw(tmp_path)["model"]["source"] | {"hidden_size": 64, "intermediate_size": 64}

    def left(**changes: object) -> str:
        recipe = tiny_recipe(tmp_path, model__source=source, **changes)
        return "\n".join(left_on_the_table(recipe, plan_of(recipe)))

    wanted = "model.trained_dtype: bfloat16, and no model.autocast"
    assert wanted in left()
    assert wanted in left(model__autocast="bfloat16")
    spoils = ("precision", "model.autocast: bfloat16"), ("layers", "model.layers: liger")
    monkeypatch.setattr("logitless.doctor.machine.recommended_here", lambda: spoils)
    assert "bench" not in left()
    assert "model.autocast: bfloat16 — bench precision" in left(model__attention="sdpa")
    monkeypatch.setattr("logitless.doctor.machine.recommended_here", list)
    assert wanted not in left(model__trained_dtype="bfloat16")
    assert wanted not in left(model__layers="transformers")
    assert wanted not in left(model__attention="sdpa")


def test_rows_are_recommended_where_there_is_room_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logitless.doctor.machine.recommended_here", lambda: [("sampling", "rollout.max_rows: 8")])
    few, all_ = tiny_recipe(tmp_path, rollout__max_rows=4), tiny_recipe(tmp_path, rollout__max_rows=16)
    assert left_on_the_table(few, plan_of(few)) == ["rollout.max_rows: 8 — bench sampling"]
    assert left_on_the_table(all_, plan_of(all_)) == []
    monkeypatch.setattr("logitless.doctor.machine.free_memory", lambda _: 3 * plan_of(few).total_bytes)
    assert left_on_the_table(few, plan_of(few)) == []


def test_recomputing_layers_is_advised_against_where_the_plan_without_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logitless.doctor.machine.recommended_here", list)
    monkeypatch.setattr("logitless.doctor.machine.device_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    recipe = tiny_recipe(tmp_path, model__gradient_checkpointing=True)
    whole = plan_of(tiny_recipe(tmp_path)).total_bytes
    for free, advised in ((whole, False), (whole + 1, True)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_, free=free: (free, 2**37))
        found = [line for line in left_on_the_table(recipe, plan_of(recipe)) if "gradient_checkpointing" in line]
        assert len(found) == advised


def test_row_invariant_layers_are_taken_on_a_gpu_for_bfloat16_weights_alone(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    source = tiny_raw(tmp_path)["model"]["source"] | {"hidden_size": 64, "intermediate_size": 64}
    lowered = tiny_recipe(tmp_path, model__source=source, model__trained_dtype="bfloat16")
    gpu = torch.device("cuda")
    assert takes_row_invariant_layers(lowered, gpu)
    assert not takes_row_invariant_layers(lowered, torch.device("cpu"))
    assert not takes_row_invariant_layers(tiny_recipe(tmp_path, model__source=source), gpu)
    own = tiny_recipe(tmp_path, model__source=source, model__trained_dtype="bfloat16", model__layers="transformers")
    assert not takes_row_invariant_layers(own, gpu)


def test_a_single_contender_that_runs_is_no_choice() -> None:
    assert best_lines([Row("only", "", 1.0, None, None, None, ("model.layers: transformers",))]) == []
