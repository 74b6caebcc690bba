import json
from pathlib import Path

import pytest
import torch

from logitless.bench import rollout_report, rollout_run
from logitless.bench.rollout import Results
from logitless.bench.rollout_workloads import Ceilings, Cost, Workload, roofline
from logitless.cli.main import main
from logitless.errors import ConfigurationError
from logitless.rollout.sampling import SamplingOptions
from tests.rollout.test_gpu import model_of

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


def test_a_workload_is_read_from_its_name_and_lengths_lie_in_its_range():
    work = Workload.parse("4x3-17-2:9")
    assert (work.prompts, work.samples, work.prompt_tokens) == (4, 3, 17)
    lengths = [length for group in work.lengths for length in group]
    assert len(lengths) == 12
    assert 2 <= min(lengths) < max(lengths) <= 9
    assert work.tokens == sum(lengths)
    assert Workload.parse("1x2-3-5").lengths == ((5, 5),)
    assert {len(ids) for ids in work.prompt_ids(100)} == {17}


@pytest.mark.parametrize("name", ["64x8-512", "0x8-512-4", "64-8-512-4", "64x8-512-4:5:6"])
def test_a_name_of_another_form_is_refused(name):
    with pytest.raises(ConfigurationError, match="64x8-512-64:512"):
        Workload.parse(name)


def test_the_roofline_is_weights_keys_and_prompts_at_the_speed_of_the_device():
    """One prompt of 10 tokens, 2 samples of 3 tokens: two steps after the prompt, which gives the first token."""
    cost, device = Cost(parameters=1000, token_bytes=40), Ceilings(bytes_per_second=100.0, flops_per_second=1e9)
    steps = sum(2000 / 100 + 40 * (10 + 2 * t) / 100 for t in (1, 2))
    assert roofline(cost, Workload(1, 2, 10, 3, 3), device) == pytest.approx(6 / (steps + 2 * 1000 * 10 / 1e9))
    slow = Ceilings(bytes_per_second=1e12, flops_per_second=1000.0)
    assert roofline(cost, Workload(1, 2, 10, 3, 3), slow) == pytest.approx(6 / (2 * 4.0 + 20.0), rel=1e-6)


def test_a_row_that_is_measured_again_takes_the_place_of_the_old_one(tmp_path):
    path, here = tmp_path / "rollout-X.json", {"gpu": "X"}
    results = Results(path, here, ("model", "engine"))
    results.add({"model": "m", "engine": "gpu", "seconds": 2.0})
    results.add({"model": "m", "engine": "other", "seconds": 3.0})
    results.add({"model": "m", "engine": "gpu", "seconds": 1.0})
    again = Results(path, here, ("model", "engine"))
    assert again.has(model="m", engine="gpu")
    assert not again.has(model="n", engine="gpu")
    assert [row["seconds"] for row in again.rows] == [1.0, 3.0]
    assert not Results(path, {"gpu": "Y"}, ("model", "engine")).rows


@pytest.mark.parametrize("name", ["gpu", "transformers"])
def test_every_engine_samples_the_lengths_of_the_workload(name, monkeypatch):
    from logitless.bench import rollout_contenders as contenders

    model = model_of(end_bias=-1e4)
    subject = object.__new__(contenders.Subject)
    subject.model, subject.vocabulary = model, 11
    work = Workload.parse("2x2-5-1:6")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    contender = contenders.CONTENDERS[name](subject, work)
    assert contender.sample() == work.tokens
    groups = contender.completions(SamplingOptions(max_new_tokens=6, stop=(contenders.NEVER,)[: contender.stops]))
    assert tuple(tuple(c.length for c in group) for group in groups) == work.lengths
    contender.close()


def test_the_tables_of_the_documentation_are_those_of_the_result_files(tmp_path):
    assert rollout_report.update([ROOT / "docs/rollout.md"], ROOT / "benchmarks/results", check=True) == 0
    document = rollout_report.documents(ROOT / "benchmarks/results", "decode-step")[0]
    rollout_report.plot_step(document, tmp_path / "step.svg")
    assert "rotary" in (tmp_path / "step.svg").read_text()


def test_a_short_run_says_where_its_time_went():
    row = rollout_run.measured("transformers", 2, Path("vllm"))
    assert row["blocks"] == 2
    assert row["seconds"] > 0
    assert row["tokens_per_second"] > 0
    assert sum(row[f"{called}_share"] for called in rollout_run.PHASES.values()) == pytest.approx(1.0)


def test_a_short_run_is_measured_without_a_gpu_and_an_engine_that_is_not_there_is_named(tmp_path, monkeypatch, capsys):
    shares = {f"{called}_share": 0.25 for called in rollout_run.PHASES.values()}
    found = {"blocks": 3, "seconds": 2.0, "tokens_per_second": 10.0, **shares}
    monkeypatch.setattr(rollout_run, "measured", lambda engine, blocks, executable: found)
    words = ["bench", "rollout", "--output", str(tmp_path)]
    assert main([*words, "--runs", "transformers,vllm_server", "--run-blocks", "3"]) == 0
    assert "| vllm_server | 10 | 2 s | 25% | 25% | 25% | 25% |" in capsys.readouterr().out
    [result] = tmp_path.glob("run-*.json")
    assert [row["engine"] for row in json.loads(result.read_text())["rows"]] == ["transformers", "vllm_server"]
    assert main([*words, "--runs", "generate"]) == 2
    assert "vllm_server" in capsys.readouterr().err
