"""Whether a recipe runs here, and the nearest settings with which it would."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from logitless.doctor import nearest
from logitless.doctor.nearest import Fit, fit_of
from logitless.train.plan.run_plan import plan_of
from logitless.train.recipe.loading import load_recipe
from logitless.train.record.memory import size_text
from tests.train.tiny import tiny_raw

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")


def fit(folder: Path, memory: int | None = None, host: int | None = None, **changes: dict[str, Any]) -> Fit:
    raw = tiny_raw(folder)
    for section, change in changes.items():
        raw[section] = raw.get(section, {}) | change
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw))
    return fit_of(path, [], memory, host)


def test_a_recipe_that_runs_here_has_no_problem_and_no_change(tmp_path: Path) -> None:
    found = fit(tmp_path)
    assert (found.problems, found.changes) == ((), ())
    assert found.plan is not None


@NO_GPU
@pytest.mark.parametrize(
    ("section", "change", "said", "changes"),
    [
        ("model", {"device": "cuda"}, "a CUDA device", ("model.device=auto",)),
        ("model", {"layers": "row_invariant"}, "no GPU", ("model.layers=transformers",)),
        ("rollout", {"engine": {"name": "gpu"}}, "a model on the CPU", ("rollout.engine={name: transformers}",)),
    ],
)
def test_what_is_missing_has_the_setting_that_does_without(
    section: str, change: dict[str, Any], said: str, changes: tuple[str, ...], tmp_path: Path
) -> None:
    found = fit(tmp_path, **{section: change})
    assert len(found.problems) == 1
    assert said in found.problems[0]
    assert found.changes == changes


@NO_GPU
def test_the_gpu_engine_and_its_layers_are_left_together(tmp_path: Path) -> None:
    found = fit(tmp_path, model={"layers": "row_invariant"}, rollout={"engine": {"name": "gpu"}})
    assert found.changes == ("model.layers=transformers", "rollout.engine={name: transformers}")
    assert found.recipe.rollout.engine.name == "transformers"


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_writer_that_is_absent_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tiny_raw(tmp_path) | {"writers": ["tensorboard", "wandb"]}))
    found = fit_of(tmp_path / "recipe.yaml", [])
    assert found.changes == ("writers=[tensorboard]",)


def test_a_plan_that_is_too_large_gets_the_fewest_changes_that_fit(tmp_path: Path) -> None:
    large = {"tokens_per_micro_batch": 10**6}
    whole = fit(tmp_path, train=large).plan
    assert whole is not None
    found = fit(tmp_path, whole.total_bytes - 1, train=large)
    assert found.changes is not None
    assert len(found.changes) == 1
    fitting = plan_of(load_recipe(tmp_path / "recipe.yaml", found.changes))
    assert fitting.total_bytes < whole.total_bytes


def test_a_plan_that_never_fits_has_no_changes(tmp_path: Path) -> None:
    found = fit(tmp_path, 1000)
    assert found.changes is None
    assert "1.0 KiB are free" in found.problems[0]


def test_a_host_with_too_little_memory_is_found_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearest, "device_of", lambda section: torch.device("cuda"))  # to which nothing is sent
    monkeypatch.setattr(nearest, "free_host_memory", lambda: 1024)
    changes = {"model": {"device": "auto", "trained_dtype": "bfloat16"}, "train": {"optimizer": {"moments": "host"}}}
    found = fit(tmp_path, 10**9, **changes)
    assert found.plan is not None
    needed = size_text(found.plan.host.peak_bytes)
    assert found.problems == (f"writing the model takes {needed} of the host's memory, and 1.0 KiB are available",)
    assert found.changes is None  # to read the model takes more than that
    monkeypatch.setattr(nearest, "free_host_memory", lambda: 16000)
    assert fit(tmp_path, 10**9, **changes).changes == ("train.optimizer.moments=float32",)
    assert fit(tmp_path, 10**9, 10**9, **changes).problems == ()


def test_what_a_gpu_needs_beside_it_is_no_matter_on_a_cpu(tmp_path: Path) -> None:
    found = fit(tmp_path, 10**9, 0)
    assert found.problems == ()
    assert found.plan is not None
    assert found.plan.host.peak_bytes == 0


def test_data_that_is_not_there_is_a_problem_without_a_change(tmp_path: Path) -> None:
    found = fit(tmp_path, data={"train": {"name": "file", "path": str(tmp_path / "no.jsonl")}})
    assert found.changes is None
    assert "no.jsonl" in found.problems[0]
