"""First contacts: the benchmark's cases run at toy size here, and what it measured on a GPU went well."""

import json
import subprocess
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
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
    "rollout.completions_per_prompt=4",
    "rollout.sampling.max_new_tokens=2",
    "rewards=[{name: regex, pattern: '[abcd]'}]",  # half of the letters: a group has both rewards
]
IN_ONE_PROCESS = [name for name, case in benchmark.CASES.items() if case.num_gpus == 1]


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Runs a case's command line on a toy model; returns the exit status."""
    monkeypatch.setattr("logitless.train.run.write_report", lambda path: None)
    monkeypatch.setattr(steps, "STEPS", 2)
    character_tokenizer("abcdefgh").save_pretrained(str(tmp_path / "tokenizer"))

    def run(model, name, engine):
        recipe = benchmark.write_recipe(tmp_path, benchmark.TOYS[model], tmp_path / "tokenizer")
        case = benchmark.CASES[name]
        sets = [*benchmark.overrides_of(case, None, engine, tmp_path, few=2), *SMALL, f"output={tmp_path}/runs"]
        command = ["train", str(recipe), *(word for each in sets for word in ("--set", each))]
        first = main([*command, "--set", "train.blocks=1"]) if case.resumed else 0
        return first or main([*command, *["--resume"] * case.resumed])

    return run


@pytest.mark.parametrize("engine", benchmark.ENGINES)
@pytest.mark.parametrize("name", IN_ONE_PROCESS)
@pytest.mark.parametrize("model", benchmark.TOYS)
def test_a_first_contact_goes_well_at_toy_size(tmp_path, toy, capsys, model, name, engine):
    refusal = benchmark.CASES[name].without_gpu_engine
    if engine == "gpu" and refusal:
        assert toy(model, name, engine) == 1
        assert refusal in capsys.readouterr().err
        return
    assert toy(model, name, engine) == 0
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
    overrides = benchmark.overrides_of(benchmark.CASES["several_gpus"], None, engine, tmp_path, few=2)
    overrides += [*SMALL, f"output={tmp_path}/runs", "train.blocks=1"]
    assert run_on_ranks(2, _on_a_rank, recipe, overrides) == [True, True]


OPTIONS = {
    "greedy_evaluation": ("evaluation.sampling.temperature", 0),
    "top_p": ("rollout.sampling.top_p", 0.9),
    "top_k": ("rollout.sampling.top_k", 5),
    "min_p": ("rollout.sampling.min_p", 0.1),
    "repetition_penalty": ("rollout.sampling.repetition_penalty", 1.3),
    "presence_penalty": ("rollout.sampling.presence_penalty", 0.5),
    "frequency_penalty": ("rollout.sampling.frequency_penalty", 0.5),
    "min_new_tokens": ("rollout.sampling.min_new_tokens", 2),
    "stop_strings": ("rollout.sampling.stop", ("a", "bc")),
    "two_evaluations": ("evaluation.sets.second.sampling.top_k", 3),
    "changed_options": ("kl.control.guardrail", "shorten_rollout"),
    "resume": ("checkpoint.keep", 1),
    "lora": ("model.lora.rank", 8),
    "four_bits": ("model.quantize", "nf4"),
    "several_gpus": ("parallel.replicate", {"gpu": 2}),
    "24_gb": ("train.optimizer.moments", {"qwen3-1.7b": "host"}),
}
"""What each case is about; by engine or model where it is of one."""


@pytest.mark.parametrize("engine", benchmark.ENGINES)
@pytest.mark.parametrize("name", benchmark.CASES)
@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "qwen3-1.7b"])
def test_every_case_is_a_recipe_at_real_size_too(tmp_path, model, name, engine):
    recipe = benchmark.write_recipe(tmp_path, str(tmp_path), tmp_path)
    overrides = benchmark.overrides_of(benchmark.CASES[name], model, engine, tmp_path)
    checked = load_recipe(recipe, overrides, plans_for_gpus=True)
    assert checked.rollout.engine.name == engine
    assert checked.model.device == "auto"
    key, value = OPTIONS[name]
    if isinstance(value, dict):
        value = value.get(engine, value.get(model))
    found = reduce(lambda at, part: at[part] if isinstance(at, dict) else getattr(at, part), key.split("."), checked)
    assert value is None or found == value


def row(seconds, *, model="a", alone=None, **others):
    found = {"model": model, "sampled_by": "GpuEngine", "ok": True, "first_call_seconds": seconds, **others}
    return found if alone is None else {**found, "alone_seconds": alone}


@pytest.mark.parametrize(
    ("rows", "beyond"),
    [
        ([row(9.0)], []),
        ([row(11.0)], [11.0]),
        ([row(20.0, alone=9.0), row(15.0)], []),  # it took less beside others than one that was quick alone
        ([row(20.0, alone=9.0), row(21.0)], [21.0]),
        ([row(20.0, alone=11.0), row(15.0)], [20.0, 15.0]),
        ([row(20.0, alone=9.0), row(15.0, model="b")], [15.0]),
        ([row(20.0, alone=9.0), row(15.0, sampled_by="TransformersEngine")], [15.0]),
        ([row(15.0, ok=False), row(None, ok=True, refused="no")], []),
    ],
)
def test_a_first_call_is_in_time_by_itself_or_by_one_that_took_longer_beside_others(rows, beyond):
    assert [each["first_call_seconds"] for each in benchmark.beyond_bound(rows)] == beyond


@pytest.mark.parametrize(
    ("status", "output", "ok"),
    [
        (1, "logitless train: needed x. Set rollout.engine: {name: transformers}, or leave it out. More.", True),
        (1, "RuntimeError: device-side assert", False),
        (0, "", False),
    ],
)
def test_a_refusal_is_well_where_it_says_what_to_do(tmp_path, monkeypatch, status, output, ok):
    monkeypatch.setattr(benchmark, "find_spec", lambda _: True)
    monkeypatch.setattr(benchmark.Runner, "_process", lambda *_, **__: (status, output, {}))
    found = benchmark.Runner(tmp_path, 1.0, ["0"]).row("smollm2-135m", "four_bits", "gpu", "0")
    assert found["ok"] is ok
    assert ("refused" in found) == ok == (found["error"] is None)


def started(monkeypatch, report, status=0):
    """How each process of a case is started; none runs, and each leaves this report."""
    found = []

    class Process:
        returncode = status

        def __init__(self, command, *, env, **_):
            at = command.index(benchmark.__file__)
            options, words = benchmark.case_arguments(command[at + 1 :])
            caches = [Path(env[name]) for name in ("TRITON_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_CACHE_PATH")]
            cached = [path.name for place in caches for path in place.iterdir()]
            options.launcher, options.device = command[1:at], env.get("CUDA_VISIBLE_DEVICES")
            found.append(SimpleNamespace(**vars(options), words=words, caches=caches, cached=cached))
            (caches[0] / "kernel").touch()
            if report:
                options.case.write_text(json.dumps(report))

        def communicate(self, timeout):
            return "what was said", None

    monkeypatch.setattr(subprocess, "Popen", Process)
    return found


BY_GPU = {"sampled_by": "GpuEngine", "first_call_seconds": 2.0}
BY_TRANSFORMERS = {"sampled_by": "TransformersEngine", "first_call_seconds": 2.0}


def test_a_case_begins_with_empty_caches_and_is_resumed_in_a_second_process(tmp_path, monkeypatch):
    found = started(monkeypatch, BY_GPU)
    assert benchmark.Runner(tmp_path, 1.0, ["3"]).row("smollm2-135m", "resume", "gpu", "3")["ok"] is True
    first, second = found
    assert first.words[:2] == ["train", str(tmp_path / "smollm2-135m" / "recipe.yaml")]
    assert first.words[-2:] == ["--set", "train.blocks=1"]
    assert second.words == [*first.words[:-2], "--resume"]
    assert (first.cached, second.cached) == ([], ["kernel"])
    assert first.caches == second.caches
    assert all(place.is_relative_to(tmp_path) for place in first.caches)
    for each in (first, second):
        assert (each.device, each.launcher, each.limit_bytes) == ("3", [], None)
        assert (each.first_only, each.written) == (False, True)


def test_a_case_has_the_memory_the_layers_and_the_processes_that_it_says(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    runner, found = benchmark.Runner(tmp_path, 1.0, ["0", "1"]), started(monkeypatch, BY_GPU)
    assert runner.row("smollm2-135m", "24_gb", "auto", "0", first_only=True)["ok"] is True
    assert runner.row("smollm2-135m", "several_gpus", "auto", None)["ok"] is True
    limited, several = found
    assert (limited.limit_bytes, limited.first_only, limited.written) == (24 * 2**30, True, False)
    assert limited.words[1] == str(tmp_path / "smollm2-135m-whole" / "recipe.yaml")
    assert several.launcher[:2] == ["-m", "torch.distributed.run"]
    assert several.launcher[-2:] == ["--nproc-per-node", "2"]
    assert (several.device, several.limit_bytes, several.first_only) == (None, None, False)


def test_a_process_may_use_no_more_than_its_limit(tmp_path, monkeypatch):
    limits = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    monkeypatch.setattr("logitless.cli.main.main", lambda arguments: len(arguments))
    try:
        for limit in (benchmark.CARD_BYTES, None):
            status = benchmark.main_of_a_case(
                tmp_path / "report.json", ["train", "x"], limit=limit, written=True, first_only=False
            )
            assert status == 2
    finally:
        mock.patch.stopall()
    assert limits == [0.3]


@pytest.mark.parametrize(
    ("name", "engine", "devices", "status", "report", "error"),
    [
        ("top_p", "auto", ["0"], 0, BY_GPU, None),
        ("top_p", "auto", ["0"], 0, BY_TRANSFORMERS, "ended without a sample of GpuEngine; what was said"),
        ("top_p", "auto", [], 0, BY_TRANSFORMERS, None),
        ("four_bits", "auto", ["0"], 0, BY_TRANSFORMERS, None),
        ("four_bits", "gpu", ["0"], 0, BY_GPU, "ended without a refusal; what was said"),
        ("top_p", "gpu", ["0"], 0, BY_TRANSFORMERS, "ended without a sample of GpuEngine; what was said"),
        ("top_p", "transformers", ["0"], 0, BY_TRANSFORMERS, None),
        ("top_p", "transformers", ["0"], 0, {}, "ended without a sample of TransformersEngine; what was said"),
        ("top_p", "gpu", ["0"], 1, BY_GPU, "what was said"),
    ],
)
def test_a_case_went_well_if_its_process_did_and_its_engine_sampled(
    tmp_path, monkeypatch, name, engine, devices, status, report, error
):
    monkeypatch.setattr(benchmark, "find_spec", lambda _: True)
    started(monkeypatch, report, status)
    row = benchmark.Runner(tmp_path, 1.0, devices).row("smollm2-135m", name, engine, None)
    assert (row["ok"], row["error"]) == (error is None, error)
