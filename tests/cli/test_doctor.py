"""``logitless doctor``: the machine, a recipe on it, someone's code."""

import importlib.util
import json
import sys
import tomllib
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml

from logitless.cli.main import main
from logitless.doctor.machine import OPTIONAL
from logitless.doctor.nearest import fit_of
from logitless.train.record.memory import size_text
from tests.train.tiny import tiny_raw

ROOT = Path(__file__).parents[2]


def recipe_file(folder, **changes):
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tiny_raw(folder) | changes))
    return str(path)


def test_the_machine_is_described_and_nothing_is_an_error(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["head backends"]["chunked"] == "runs"
    assert found["attention"]["packed"] == "runs"
    assert found["engines"]["transformers"] == "runs"
    assert set(found["engines"]) == {"transformers", "recorded", "gpu", "vllm_server"}
    assert found["packages"]["torch"] == torch.__version__
    assert {"machine", "optional", "settings", "bitwise identical", "sandbox around a model's text"} <= set(found)


def test_every_optional_package_of_an_extra_is_listed_with_its_version_or_how_to_get_it(capsys):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert main(["doctor", "--json"]) == 0
    optional = json.loads(capsys.readouterr().out)["optional"]
    assert set(OPTIONAL.values()) == set(extras) - {"dev", "docs"}
    for module, extra in OPTIONAL.items():
        [package] = {
            name for each in extras[extra] if (name := each.split(">=")[0]).startswith(module.replace("_", "-"))
        }
        there = importlib.util.find_spec(module) is not None
        assert optional[module] == (metadata.version(package) if there else f"absent: pip install 'logitless[{extra}]'")


def test_a_recipe_that_runs_has_plan_audit_and_forecast(tmp_path, capsys):
    assert main(["doctor", recipe_file(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert all(part in out for part in ("audit\n  nothing found", "the run", "planned", "\nforecast\n  measured "))
    assert "cannot run here" not in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_a_gpu_that_torch_does_not_see_is_named_where_its_driver_would_be(capsys, monkeypatch):
    monkeypatch.setattr("logitless.doctor.machine.unused_gpu", lambda: "torch sees no GPU")
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["machine"]["driver"] == "torch sees no GPU"


def test_without_measuring_there_is_no_forecast(tmp_path, capsys):
    assert main(["doctor", recipe_file(tmp_path), "--no-measure", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"audit", "choices", "plan", "left on the table"}


def test_of_a_mixture_it_is_said_before_anything_is_loaded_that_exact_layers_do_not_cover_it(tmp_path, capsys):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    source = tiny_raw(tmp_path)["model"]["source"] | experts
    for model_type, reason in (("qwen2_moe", "the architecture qwen2_moe; a model on"), ("qwen3_moe", "a model on")):
        given = json.dumps(source | {"model_type": model_type})
        assert main(["doctor", recipe_file(tmp_path), "--no-measure", "--set", f"model.source={given}"]) == 0
        assert f"layers transformers' own, for {reason} the CPU\n" in capsys.readouterr().out


def test_beside_a_gpu_the_plan_has_the_memory_of_its_host(tmp_path, capsys, monkeypatch):
    path = recipe_file(tmp_path)
    found = fit_of(Path(path), ["model.device=auto"], 10**9, 10**9)
    monkeypatch.setattr("logitless.doctor.nearest.fit_of", lambda *_: replace(found, changes=None))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert main(["doctor", path, "--no-measure", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["plan"]["memory of the host"]
    assert found.plan is not None
    assert said == f"{size_text(found.plan.host.peak_bytes)}, most while reading the model"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_a_recipe_that_cannot_run_exits_with_1_and_the_nearest_settings(tmp_path, capsys):
    path = recipe_file(tmp_path)
    assert main(["doctor", path, "--set", "model.device=cuda", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["would run with"] == ["--set 'model.device=auto'"]
    assert "forecast" not in found
    assert main(["doctor", path, "--set", "model.device=auto", "--no-measure"]) == 0


def test_where_no_setting_fits_it_is_said_and_the_plan_for_more_gpus_named(tmp_path, capsys, monkeypatch):
    path = recipe_file(tmp_path)
    monkeypatch.setattr("logitless.doctor.nearest.fit_of", lambda *given: fit_of(*given, memory=1))
    assert main(["doctor", path, "--no-measure"]) == 1
    out = capsys.readouterr().out
    assert f"would run with\n  none of the settings that were tried; `logitless plan {path} --gpus N` says" in out


def test_an_invalid_recipe_exits_with_2(tmp_path, capsys):
    assert main(["doctor", recipe_file(tmp_path, trian={})]) == 2
    assert "unknown key 'trian'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train.py", "train.ipynb"])
def test_training_code_in_place_of_a_recipe_is_refused_with_the_option_that_reads_it(name, tmp_path, capsys):
    (tmp_path / name).write_text("import torch\n")
    assert main(["doctor", str(tmp_path / name)]) == 2
    assert f"doctor --source {tmp_path / name}" in capsys.readouterr().err


def test_findings_in_a_recipe_leave_the_exit_status_alone(tmp_path, capsys):
    assert main(["doctor", recipe_file(tmp_path), "--set", "train.epochs_per_block=9", "--no-measure"]) == 0
    assert "train.epochs_per_block: 9 [epochs]" in capsys.readouterr().out


def test_source_is_listed_with_exit_status_0_and_never_run(tmp_path, capsys):
    (tmp_path / "train.py").write_text("import os\nos._exit(5)\nimport xformers\n")
    before = {*sys.modules}
    assert main(["doctor", "--source", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "train.py:3: import xformers [xFormers required]" in out
    assert "nothing was run" in out
    assert "train" not in {*sys.modules} - before
    (tmp_path / "train.py").write_text("import os\n")
    assert main(["doctor", "--source", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "nothing found by" in out
    assert "worth a look" not in out
