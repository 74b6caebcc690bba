"""First contacts: the benchmark's cases run at toy size here, and what it measured on a GPU went well."""

from unittest import mock

import pytest
import torch.distributed as dist

import first_contact as benchmark
from logitless.cli.main import main
from logitless.distributed.ranks import Ranks
from logitless.models.char_tokenizer import character_tokenizer
from logitless.rollout.gpu import steps
from logitless.train.recipe.loading import load_recipe
from logitless.train.record.run_folder import RunFolder
from logitless.train.run import run_recipe
from tests.head.interpreter import complete_interpreter, interpreted
from tests.ranks import run_on_ranks

if interpreted():
    complete_interpreter()

SMALL = [
    "model.device=cpu",
    "rollout.prompts_per_block=2",
    "rollout.completions_per_prompt=2",
    "rollout.sampling.max_new_tokens=2",
]
IN_ONE_PROCESS = [name for name, case in benchmark.CASES.items() if case.num_gpus == 1]


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Runs a case's command line on its model; returns the exit status."""
    monkeypatch.setattr("logitless.train.run.write_report", lambda path: None)
    monkeypatch.setattr(steps, "STEPS", 2)
    character_tokenizer("abcdefgh").save_pretrained(str(tmp_path / "tokenizer"))

    def run(name, engine):
        model = list(benchmark.TOYS)[list(benchmark.CASES).index(name) % len(benchmark.TOYS)]
        recipe = benchmark.write_recipe(tmp_path, benchmark.TOYS[model], tmp_path / "tokenizer")
        case = benchmark.CASES[name]
        sets = [*benchmark.overrides_of(case, engine, tmp_path, few=2), *SMALL, f"output={tmp_path}/runs"]
        command = ["train", str(recipe), *(word for each in sets for word in ("--set", each))]
        first = main([*command, "--set", "train.blocks=1"]) if case.resumed else 0
        return first or main([*command, *["--resume"] * case.resumed])

    return run


@pytest.mark.parametrize("engine", benchmark.ENGINES)
@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_a_first_contact_goes_well_at_toy_size(tmp_path, toy, capsys, name, engine):
    case = benchmark.CASES[name]
    if case.needs:
        pytest.importorskip(case.needs)
    if engine == "gpu" and case.without_gpu_engine:
        assert toy(name, engine) == 1
        assert "Sample with rollout.engine: {name: transformers}" in capsys.readouterr().err
        return
    assert toy(name, engine) == 0
    assert ("layers row-invariant" in capsys.readouterr().out) == (engine == "gpu")
    lines = [line for line in RunFolder(tmp_path / "runs" / "contact").read_metrics() if "loss/total" in line]
    assert len(lines) == (4 if name == "changed_options" else 2)
    if name == "changed_options":
        assert lines[-1]["length/mean"] <= 1 < lines[0]["length/mean"]  # the guardrail has halved it
    if name == "two_evaluations":
        assert {"evaluation/length_mean", "held_out/second/length_mean"} <= lines[-1].keys()


def _on_a_rank(rank, recipe, overrides):
    if interpreted():
        complete_interpreter()
    with mock.patch.object(steps, "STEPS", 2), mock.patch("logitless.train.run.write_report"):
        return run_recipe(load_recipe(recipe, overrides), ranks=Ranks(data=dist.group.WORLD)).complete


@pytest.mark.parametrize("engine", benchmark.ENGINES)
def test_a_first_contact_of_two_processes_goes_well_at_toy_size(tmp_path, engine):
    character_tokenizer("abcdefgh").save_pretrained(str(tmp_path / "tokenizer"))
    recipe = benchmark.write_recipe(tmp_path, benchmark.TOYS["smollm2-135m"], tmp_path / "tokenizer")
    overrides = benchmark.overrides_of(benchmark.CASES["several_gpus"], engine, tmp_path, few=2)
    overrides += [*SMALL, f"output={tmp_path}/runs", "train.blocks=1"]
    assert run_on_ranks(2, _on_a_rank, recipe, overrides) == [True, True]


@pytest.mark.parametrize("engine", benchmark.ENGINES)
@pytest.mark.parametrize("name", benchmark.CASES)
def test_every_case_is_a_recipe_at_real_size_too(tmp_path, name, engine):
    recipe = benchmark.write_recipe(tmp_path, str(tmp_path), tmp_path)
    checked = load_recipe(recipe, benchmark.overrides_of(benchmark.CASES[name], engine, tmp_path))
    assert checked.rollout.engine.name == engine
    assert checked.model.device == "auto"
