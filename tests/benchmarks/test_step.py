"""The benchmark of a whole step, tried on the CPU on a tiny model; its search; the committed results."""

import argparse
import ast
import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import step
import step_profile
import step_rows
from shapes import SHAPES, TINY, WORKLOADS, Workload
from step_contenders import CONTENDERS, Rollouts, _padded

pytestmark = pytest.mark.filterwarnings("default")  # of transformers, accelerate and TRL

ROOT = Path(__file__).parents[2]
FIELDS = {
    "contender", "seconds", "seconds_min", "seconds_max", "runs", "tokens", "tokens_per_second", "peak_bytes",
    "reserved_bytes", "loss", "grad_norm", "failure",
}  # fmt: skip
PUBLISHED = {"qwen2.5-0.5b": 494_032_768, "qwen3-1.7b": 1_720_574_976, "llama-3.1-8b-lora": 8_030_261_248}

if importlib.util.find_spec("trl") is None:
    pytest.skip("TRL is not installed: the benchmark of a step is not tested", allow_module_level=True)


def options(folder, *more):
    parser = argparse.ArgumentParser()
    step.add_arguments(parser)
    sizes = ["--workloads", "long", "--steps", "1", "--lengths", "16,40", "--references", str(folder / "references")]
    sizes += ["--minutes", "1000", "--probe-seconds", "inf"]  # all of it, however long this machine stands still
    return parser.parse_args(["--device", "cpu", "--models", "tiny", *sizes, "--output", str(folder), *more])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a run over everything."""
    folder = tmp_path_factory.mktemp("results")
    assert step.run(options(folder)) == 0
    return folder


def document_in(folder):
    return json.loads((folder / "step-tiny.json").read_text())


@pytest.mark.slow
def test_a_run_leaves_complete_rows_of_every_contender(folder):
    document = document_in(folder)
    found = [(row["contender"], row["live"]) for row in document["rows"]]
    named = [name for name in step_rows.CONTENDERS if name not in step_rows.MOMENTS]
    assert sorted(found) == sorted((name, live) for name in named for live in step_rows.LIVE)
    for row in document["rows"]:
        assert (row["model"], row["workload"], row["failure"]) == ("tiny", "long", None)
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        own = [r for r in document["rows"] if r["live"] == 1.0 and r["contender"] == "trl"]
        assert row["over_trl"] == pytest.approx(own[0]["seconds"] / row["seconds"])
        assert row["over_trl_without_recomputation"] > 0
    assert [(row["contender"], row["completion_tokens"]) for row in document["lengths"]] == [
        (name, length) for length in (16, 40) for name in CONTENDERS
    ]
    for row in document["lengths"]:
        assert row.keys() >= FIELDS
        assert row["failure"] is None
    assert document["longest"] == []
    assert {"gpu", "driver", "torch", "triton", "transformers", "trl"} <= document["environment"].keys()
    assert (folder / "step.png").stat().st_size > 0


@pytest.mark.slow
def test_every_contender_computes_the_same_loss_gradient_and_step(folder):
    document = document_in(folder)
    for row in document["rows"]:
        assert row["grad_norm"] > 0.1
        assert row["loss_difference"] < 1e-6
        assert row["grad_norm_difference"] < 1e-5
        assert row["weights_difference"] < 1e-2
    for rows in (document["lengths"][:4], document["lengths"][4:]):
        for row in rows[1:]:
            assert row["loss"] == pytest.approx(rows[0]["loss"], abs=1e-6)
            assert row["grad_norm"] == pytest.approx(rows[0]["grad_norm"], rel=1e-5)


def test_half_of_the_groups_have_no_advantage_and_weigh_in_no_flops():
    rollouts = Rollouts.draw(WORKLOADS["512/64-256"].shrunk(64), 41)
    half = rollouts.with_live(0.5)
    assert len(half.live_sequences) == rollouts.packed.num_sequences // 2
    whole, some = (step_rows.floating_point_operations(TINY, each) for each in (rollouts, half))
    assert 0.3 * whole < some < 0.7 * whole


def test_the_operations_of_a_step_are_those_of_its_products():
    """6 a weight of the body and a token, 6 a weight of the matrix and a scored token."""
    rollouts = Rollouts.draw(WORKLOADS["long"].shrunk(64), 41)
    config = TINY.config
    width, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    attention = width * (width + width + 2 * width // 2)  # query, output; a key and a value head of two
    body = layers * (attention + 3 * width * inner + 2 * width) + width
    matrix = config["vocab_size"] * width
    assert step_rows.floating_point_operations(TINY, rollouts) == 6 * (
        body * rollouts.num_tokens + matrix * rollouts.packed.num_tokens
    )


def test_every_kernel_of_the_trainer_is_told_by_its_name():
    package = ROOT / "src" / "logitless"
    jitted, used = set[str](), set[str]()
    for file in (file for part in ("head", "models", "train") for file in (package / part).rglob("kernels/*.py")):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and "jit" in " ".join(map(ast.unparse, function.decorator_list)):
                jitted.add(function.name)
                used |= {name.id for name in ast.walk(function) if isinstance(name, ast.Name)}
    launched = jitted - used
    assert len(launched) > 30
    assert {name for name in launched if step_profile.kernel_class(name) == step_profile.OTHER} == set()


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.name in PUBLISHED], ids=lambda shape: shape.name)
def test_a_shape_has_the_published_number_of_parameters(shape):
    fields = dict(shape.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[shape.name]


def test_trl_is_given_prompts_padded_on_the_left_and_completions_on_the_right():
    rollouts = Rollouts.draw(Workload(prompts=2, prompt_tokens=8, completion_tokens=16), 41)
    packed = rollouts.packed
    padded = _padded(replace(rollouts, logp_old=torch.zeros(packed.num_tokens)))
    ids = padded["prompt_ids"][padded["prompt_mask"] == 1], padded["completion_ids"][padded["completion_mask"] == 1]
    assert torch.equal(ids[1], packed.target)
    assert padded["prompt_mask"][:, -1].all()
    assert padded["completion_mask"][:, 0].all()
    assert padded["prompt_mask"].diff(dim=1).min() >= 0 >= padded["completion_mask"].diff(dim=1).max()
    first = padded["prompt_mask"][0].sum()
    assert torch.equal(ids[0][:first], packed.inputs.input_ids[:first])
    assert padded["advantages"].view(2, 8).mean(1) == pytest.approx([0.0, 0.0], abs=1e-6)
    assert (padded["advantages"].view(2, 8).std(1) > 0.9).all()


# --- the search -------------------------------------------------------------------------------------------------------


def test_the_search_ends_within_three_per_cent_of_the_limit_though_the_first_peaks_lie_flat():
    def peak(tokens):  # the optimizer's 8000 hide the activations of short sequences
        return max(8000, 6000 + tokens // 8)

    tried = []

    def run(tokens):
        tried.append(tokens)
        return peak(tokens) if peak(tokens) <= 24_000 else None  # so that 144,000 tokens fit

    found = step.longest({8192: peak(8192), 32768: peak(32768)}, 24_000, lambda _: True, run)
    assert found.how == "measured"
    assert 0.97 * 144_000 <= found.completion_tokens <= 144_000
    assert len(tried) <= step.PROBES
    assert found.out_of_memory_at is None or found.out_of_memory_at > 144_000


def test_a_length_that_would_take_too_long_is_extrapolated_and_never_run():
    found = step.longest({1000: 20_000, 2000: 30_000}, 110_000, lambda n: n < 5000, lambda _: pytest.fail("was run"))
    assert found == step.Longest(9984, "extrapolated", None)
