"""The benchmark of a whole step, tried on the CPU on a tiny model; its search; the committed results."""

import argparse
import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from logitless.bench import step, step_report
from logitless.bench.step_contenders import CONTENDERS, SHAPES, InstalledTRL, Rollouts, Workload, _padded
from logitless.errors import ConfigurationError, UnavailableError

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
    sizes = ["--steps", "2", "--prompt-tokens", "8", "--completion-tokens", "24", "--lengths", "16,40"]
    return parser.parse_args(["--device", "cpu", "--models", "tiny", *sizes, "--output", str(folder), *more])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a run over everything."""
    folder = tmp_path_factory.mktemp("results")
    assert step.run(options(folder)) == 0
    return folder


def test_a_run_leaves_complete_rows_of_every_contender(folder):
    document = json.loads((folder / "step-tiny.json").read_text())
    assert {row["contender"] for row in document["rollouts"]} == set(CONTENDERS)
    assert [(row["contender"], row["completion_tokens"]) for row in document["lengths"]] == [
        (name, length) for length in (16, 40) for name in CONTENDERS
    ]
    full = document["rollouts"][0]["seconds"]
    for row in document["rollouts"]:
        assert row.keys() == FIELDS | {"ratio_to_full"}
        assert row["ratio_to_full"] == pytest.approx(row["seconds"] / full)
        assert row["runs"] == 2
    for row in document["rollouts"] + document["lengths"]:
        assert row.keys() >= FIELDS
        assert row["failure"] is None
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
    assert document["longest"] == []
    assert {"gpu", "driver", "torch", "triton", "transformers", "trl"} <= document["environment"].keys()
    assert (folder / "step.png").stat().st_size > 0


def test_every_contender_computes_the_same_loss_and_gradient(folder):
    document = json.loads((folder / "step-tiny.json").read_text())
    for rows in (document["rollouts"], document["lengths"][:4], document["lengths"][4:]):
        full = rows[0]
        assert full["grad_norm"] > 0.1
        for row in rows[1:]:
            assert row["loss"] == pytest.approx(full["loss"], abs=1e-6)
            assert row["grad_norm"] == pytest.approx(full["grad_norm"], rel=1e-5)


def test_a_second_run_measures_nothing_again_and_another_workload_everything(folder, capsys):
    before = (folder / "step-tiny.json").read_text()
    step.run(options(folder))
    assert (folder / "step-tiny.json").read_text() == before
    step.run(options(folder, "--completion-tokens", "16", "--lengths", ""))
    assert json.loads((folder / "step-tiny.json").read_text())["lengths"] == []
    assert "logitless, memory budget 0" in capsys.readouterr().out


def test_a_trainer_that_is_not_installed_is_recorded_as_such_and_tried_again(tmp_path, monkeypatch):
    def missing(*_args, **_more):
        raise UnavailableError(needed="TRL to compare with", given="none", remedy="pip install 'logitless[trl]'.")

    with monkeypatch.context() as patch:
        patch.setattr(InstalledTRL, "__init__", missing)
        step.run(options(tmp_path, "--lengths", "16", "--steps", "1"))
    row = json.loads((tmp_path / "step-tiny.json").read_text())["rollouts"][-1]
    assert (row["contender"], row["seconds"]) == ("trl", None)
    assert "TRL to compare with" in row["failure"]
    step.run(options(tmp_path, "--lengths", "16", "--steps", "1"))
    assert json.loads((tmp_path / "step-tiny.json").read_text())["rollouts"][-1]["failure"] is None


def test_an_unknown_model_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"qwen3-1\.7b"):
        step.run(options(tmp_path, "--models", "gpt-5"))


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


def test_the_search_interpolates_below_what_was_measured():
    found = step.longest({1000: 20_000, 9000: 100_000}, 60_000, lambda _: True, lambda n: 10_000 + 10 * n)
    assert found == step.Longest(4992, "measured", None)


def test_the_search_steps_back_where_memory_is_fragmented():
    found = step.longest(
        {1000: 20_000, 2000: 30_000}, 110_000, lambda _: True, lambda n: 10_000 + 10 * n if n <= 9500 else None
    )
    assert (found.how, found.out_of_memory_at) == ("measured", 9600)
    assert 0.96 * 9500 <= found.completion_tokens <= 9500


def test_a_length_that_would_take_too_long_is_extrapolated_and_never_run():
    found = step.longest({1000: 20_000, 2000: 30_000}, 110_000, lambda n: n < 5000, lambda _: pytest.fail("was run"))
    assert found == step.Longest(9984, "extrapolated", None)


def test_a_model_that_does_not_fit_itself_has_no_longest_sequence():
    found = step.longest({1000: 50_000, 2000: 60_000}, 30_000, lambda _: True, lambda _: pytest.fail("was run"))
    assert found == step.Longest(0, "measured", None)


def test_the_time_of_a_step_is_predicted_through_the_two_longest_measured():
    rows = [{"contender": "trl", "completion_tokens": n, "seconds": 2 * n + 3 * n * n} for n in (1, 5, 20)]
    rows.append({"contender": "trl", "completion_tokens": 99, "seconds": None})
    assert step._predicted_seconds(rows, "trl", 40) == pytest.approx(2 * 40 + 3 * 40**2)
    assert step._predicted_seconds(rows[:1], "trl", 40) == pytest.approx(5 * 40)
    assert step._predicted_seconds(rows, "logitless", 40) == 0


# --- documents --------------------------------------------------------------------------------------------------------


def test_the_table_shows_failures_and_what_was_extrapolated():
    row = {"contender": "trl", "seconds": None, "failure": "out of memory", "tokens": 9}
    document = {
        "environment": dict.fromkeys(("gpu", "driver", "torch", "triton", "transformers", "trl"), "1"),
        "workload": {"prompts": 1, "completions_per_prompt": 8, "completion_tokens": 16},
        "model": {"title": "M", "parameters": 1},
        "rollouts": [row],
        "longest": [
            {"contender": "trl", "memory_gb": 24, "completion_tokens": 0, "how": "measured"},
            {"contender": "trl", "memory_gb": 80, "completion_tokens": 4096, "how": "extrapolated"},
        ],
    }
    assert "| TRL | out of memory |  |  |  |  |  | none | ~4,096 |" in step_report.table([document])


def test_the_committed_table_is_made_from_the_committed_results():
    pages = [ROOT / "README.md", ROOT / "docs/step.md"]
    assert step_report.update(pages, step_report.load(ROOT / "benchmarks/results"), check=True) == 0
