"""The comparison of pretrained weights: its rows, its tables, and toy runs of both trainers from the same weights."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny_gguf import write_gguf

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
spec = importlib.util.spec_from_file_location("evidence_smollm2", ROOT / "benchmarks" / "evidence_smollm2.py")
evidence = importlib.util.module_from_spec(spec)
spec.loader.exec_module(evidence)
sys.path.remove(str(ROOT / "benchmarks"))


def row(trainer: str, seed: int, after: float, **changed: Any) -> dict[str, Any]:
    made = {"task": "addition", "trainer": trainer, "variant": "full", "seed": seed, "held_out_before": 0.01}
    made |= {"held_out_after": after, "seconds": 40.0, "blocks": 3, "at_once": 1, "learning_rate": 1e-5}
    return made | {"block_seconds": [10.0, 10.0, 20.0], "curve": [[0, 0.01], [3, after]], "base": "w"} | changed


MACHINE = {"gpu": "NVIDIA H200", "torch": "2.11", "transformers": "5.17", "trl": "1.16"}


def document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"rows": rows, "machine": MACHINE, "commit": "0123456789abcdef"}


def test_the_table_has_the_interval_of_the_difference_and_the_seconds_of_runs_that_were_alone() -> None:
    """Three seeds each, all 0.1 apart: the pooled spread is 0.1, sqrt(2/3) of it times 2.776 is 0.227."""
    rows = [row("logitless", seed, 0.7 + seed / 10, at_once=1 + 2 * (seed > 0)) for seed in range(3)]
    rows += [
        row("trl", s, 0.7 + s / 10, seconds=120.0, block_seconds=[40.0] * 3, at_once=1 + (s > 0)) for s in range(3)
    ]
    first, second = evidence.compared(rows).splitlines()[2:]
    assert first == "| addition | full | logitless | 3 | 0.010 | 0.800 ± 0.100 |  | 3 | 10.00 s | 40 s |  |"
    assert (
        second == "| addition | full | trl | 3 | 0.010 | 0.800 ± 0.100 | +0.000 ± 0.227 | 3 | 40.00 s | 120 s | 3.0 |"
    )


def test_seconds_of_runs_that_shared_a_gpu_are_not_told() -> None:
    rows = [row("logitless", 0, 0.8, at_once=3), row("trl", 0, 0.8)]
    first, second = evidence.compared(rows).splitlines()[2:]
    assert first.endswith("| 3 |  |  |  |")
    assert second.endswith("| 3 | 10.00 s | 40 s |  |")


def test_ablations_are_told_beside_the_run_that_they_change() -> None:
    rows = [row("logitless", 0, 0.8), row("logitless", 0, 0.6, variant="lora", learning_rate=1e-4)]
    assert evidence.ablations(rows[:1]) == ""
    assert evidence.ablations(rows).splitlines()[2:] == [
        "| addition | full | 1 | 0.010 | 0.800 | 1e-05 |",
        "| addition | lora | 1 | 0.010 | 0.600 | 0.0001 |",
    ]


def test_a_page_says_nothing_where_there_is_no_result_file() -> None:
    page = "a\n<!-- evidence-smollm2: begin -->\nold\n<!-- evidence-smollm2: end -->\nb\n"
    empty = "a\n<!-- evidence-smollm2: begin -->\n<!-- evidence-smollm2: end -->\nb\n"
    assert evidence.published(page, {}) == empty
    assert evidence.published(empty, {}) == empty
    told = evidence.published(page, {"evidence-smollm2-H200": document([row("logitless", 0, 0.8), row("trl", 0, 0.7)])})
    assert "old" not in told
    assert "NVIDIA H200" in told
    assert "../benchmarks/results/evidence-smollm2-H200-addition.svg" in told
    assert evidence.published(told, {}) == empty


def test_the_page_is_what_the_result_files_say() -> None:
    page = evidence.PAGE.read_text()
    assert evidence.published(page, evidence.documents_of(evidence.RESULTS)) == page


def test_rows_that_a_file_has_are_not_made_again(tmp_path) -> None:
    out = tmp_path / "evidence-smollm2-cpu.json"
    runs = [evidence.Run("addition", trainer, "full", 0) for trainer in evidence.TRAINERS]
    assert evidence.lacking(out, runs) == runs
    out.write_text(json.dumps(document([row("trl", 0, 0.8)])))
    assert evidence.lacking(out, runs) == runs[:1]


def test_rows_of_other_weights_are_refused(tmp_path) -> None:
    out = tmp_path / "out.json"
    out.write_text(json.dumps(document([row("trl", 0, 0.8, base="others")])))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "digest").write_text("w")
    with pytest.raises(SystemExit, match="began with other weights"):
        evidence.gather(tmp_path, out)


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A folder with tiny weights to begin with, and the task's data."""
    folder = tmp_path_factory.mktemp("toy")
    evidence.base(folder, str(write_gguf(folder / "tiny.gguf", quantized=True)))
    for name, numbers in (("train", range(8)), ("held_out", range(8, 12))):
        rows = ({"prompt": f"{n}+{n}?", "answer": str(2 * n)} for n in numbers)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return folder


@pytest.mark.parametrize(
    ("trainer", "variant"), [("logitless", "full"), ("logitless", "staleness 1"), ("trl", "full"), ("trl", "lora")]
)
def test_a_toy_run_of_each_trainer_leaves_a_row_with_its_curve(toy, trainer, variant) -> None:
    changes = [
        *("train.blocks=2", "rollout.prompts_per_block=2", "rollout.completions_per_prompt=2"),
        *("rollout.sampling.max_new_tokens=4", "evaluation.every_blocks=1", "model.trained_dtype=float32"),
        *(f"data.{name}.path={toy / name}.jsonl" for name in ("train", "held_out")),
    ]
    run = evidence.Run("addition", trainer, variant, 0)
    evidence.work(run, toy, changes, at_once=1)
    evidence.gather(toy, toy / "out.json")
    found = [each for each in json.loads((toy / "out.json").read_text())["rows"] if run.is_of(each)]
    assert len(found) == 1
    assert (found[0]["blocks"], len(found[0]["block_seconds"]), len(found[0]["reward"])) == (2, 2, 2)
    assert [block for block, _ in found[0]["curve"]] == [0, 1, 2]
    assert found[0]["seconds"] == pytest.approx(sum(found[0]["block_seconds"]))
    assert min(found[0]["block_seconds"]) > 0
    rate = 2e-5 * (10 if variant == "lora" else 1)
    assert found[0]["learning_rate"] == pytest.approx(rate)
