"""The comparison with TRL and the ablations: their data, their measure, their recipes."""

import importlib.util
import json
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from logitless.models.loading import load_model
from logitless.train.policy import Policy
from logitless.types import LMHead

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("evidence", ROOT / "benchmarks" / "evidence.py")
evidence = importlib.util.module_from_spec(spec)
spec.loader.exec_module(evidence)

ROWS = [{"id": "ba", "prompt": "ba=", "answer": "ab"}, {"id": "dc", "prompt": "dc=", "answer": "cd"}]


def test_no_question_that_is_judged_is_trained_on_or_imitated_and_answers_are_sorted():
    rows = evidence.data_of("tiny")
    judged = {row["prompt"] for row in rows["held_out"]}
    assert len(judged) == 512
    assert not judged & {row["prompt"] for row in [*rows["train"], *rows["imitated"]]}
    assert all(sorted(row["prompt"][:-1]) == list(row["answer"]) for row in rows["held_out"])


def test_accuracy_is_the_mean_probability_of_the_whole_answer_and_its_end():
    config = {"model_type": "llama", "vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1}
    model = load_model(config | {"num_attention_heads": 1}, random_weights=True).eval()
    tokenizer = evidence.letters()
    expected = []
    for row in ROWS:
        prompt, answer = tokenizer(row["prompt"])["input_ids"], [*tokenizer(row["answer"])["input_ids"], 2]
        logp = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected.append(logp[range(3), answer].sum().exp().item())
    found = evidence.accuracy(Policy(model), evidence.answered(ROWS, tokenizer))
    assert found == pytest.approx(sum(expected) / 2, rel=1e-4)


@pytest.mark.parametrize("name", evidence.ABLATIONS)
def test_each_ablation_is_a_recipe_that_differs_as_it_says(tmp_path, name):
    base = evidence.recipe("tiny", tmp_path, "logitless", 0)
    changed = evidence.recipe("tiny", tmp_path, name, 0)
    sections = evidence.ABLATIONS[name]
    assert base.output != changed.output
    assert sections or name in evidence.HEADS
    for section in ("data", "rewards", "rollout", "algorithm", "train"):
        same = getattr(base, section) == getattr(changed, section)
        assert same or section in sections
        assert not same or section not in sections or "engine" in sections[section]  # a CPU's engine is that anyway


def test_heads_of_the_ablations_say_the_same_but_for_bfloat16():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator) for shape in ((50, 16), (30, 16)))
    target, head = torch.arange(50) % 30, LMHead(weight)
    exact = evidence.EXACT(hidden, head, target, temperature=1.0, backend="reference")
    for name, bound in (("log-probs in bfloat16", 0.6), ("log-probs rounded to bfloat16", 0.07)):
        found = evidence.HEADS[name](hidden, head, target, temperature=1.0, backend="reference")
        difference = float((found.logp - exact.logp).abs().max())
        assert 0 < difference < bound  # below 32 half a unit of the eighth bit is 1 / 16; logits err too
        assert torch.equal(found.logp.bfloat16().float(), found.logp)
        assert float((found.entropy - exact.entropy).abs().max()) < bound


def row(name, seed, blocks, base="abc"):
    return {
        "run": name,
        "seed": seed,
        "base": base,
        "at_once": 2,
        "reward": [0.5] * blocks,
        "block_seconds": [2.0] * blocks,
        "train_seconds": 2.0 * blocks,
        "accuracy": 0.9,
    }


def folder_with(path, *rows):
    (path / "rows").mkdir(parents=True)
    (path / "base.json").write_text(json.dumps({"digest": "abc", "accuracy": 0.3}))
    for number, each in enumerate(rows):
        (path / "rows" / f"{number}.json").write_text(json.dumps(each))
    return path


def test_rows_are_put_into_their_files_and_an_unfinished_one_gives_place_to_a_longer_one(tmp_path):
    results, whole = tmp_path / "results", evidence.SIZES["tiny"]["blocks"]
    wanted = [evidence.Run("trl", 0), evidence.Run("trl", 1), evidence.Run("ppo", 0)]
    first = folder_with(tmp_path / "a", row("trl", 0, whole), row("trl", 1, 3), row("ppo", 0, whole))
    evidence.gather("tiny", first, results)
    assert evidence.lacking("tiny", results, wanted) == [evidence.Run("trl", 1)]
    evidence.gather("tiny", folder_with(tmp_path / "b", row("trl", 1, whole), row("trl", 0, 2)), results)
    assert evidence.lacking("tiny", results, wanted) == []
    found = json.loads((results / "evidence-tiny-comparison.json").read_text())
    assert [(each["seed"], len(each["reward"])) for each in found["rows"]] == [(0, whole), (1, whole)]
    assert [each["run"] for each in json.loads((results / "evidence-tiny-ablations.json").read_text())["rows"]] == [
        "ppo"
    ]


def test_rows_that_began_with_other_weights_are_not_put_beside_each_other(tmp_path):
    results = tmp_path / "results"
    evidence.gather("tiny", folder_with(tmp_path / "a", row("trl", 0, 2)), results)
    other = folder_with(tmp_path / "b", row("trl", 1, 2))
    (other / "base.json").write_text(json.dumps({"digest": "abd", "accuracy": 0.3}))
    with pytest.raises(SystemExit, match="other weights"):
        evidence.gather("tiny", other, results)


def test_a_run_leaves_its_row_with_the_device_it_shared_and_how_long_it_took(tmp_path, monkeypatch):
    folder = folder_with(tmp_path / "a")
    (folder / "held_out.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ROWS))
    monkeypatch.setattr(
        evidence, "logitless_run", lambda *_: {"reward": [0.5], "block_seconds": [2.0], "weights": "there"}
    )
    monkeypatch.setattr(evidence, "policy_from", lambda weights: weights)
    monkeypatch.setattr(evidence, "accuracy", lambda policy, pairs: 0.9)
    evidence.work("tiny", folder, evidence.Run.of("cispo:0"), at_once=2, until=float("inf"))
    [path] = folder.glob("rows/*")
    found = json.loads(path.read_text())
    assert found.pop("run_seconds") >= 0
    assert found == row("cispo", 0, 1)


def test_runs_are_spread_over_the_gpus_and_one_that_fails_stops_no_other(tmp_path, monkeypatch, capsys):
    folder, results, places, begun = folder_with(tmp_path / "a"), tmp_path / "results", {}, threading.Barrier(4)

    def process(command, *, stdout, stderr, env):
        run = evidence.Run.of(command[command.index("--run") + 1])
        places[run] = env["CUDA_VISIBLE_DEVICES"]
        begun.wait(300)  # all four are under way at once
        if run.name == "gspo":
            stdout.write("no such thing")
            return subprocess.CompletedProcess(command, 1)
        part = folder / "rows" / f"{evidence.file_name(*run)}.part"
        part.write_text(json.dumps(row(run.name, run.seed, 1)))
        part.rename(part.with_suffix(".json"))  # whole at once, as work() leaves it: others gather meanwhile
        return subprocess.CompletedProcess(command, 0)

    (folder / "rows").mkdir(exist_ok=True)
    monkeypatch.setattr(evidence.subprocess, "run", process)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    monkeypatch.setenv("COMMIT", "abc")
    runs = [evidence.Run.of(text) for text in ("gspo:0", "cispo:0", "trl:0", "trl:1")]
    evidence.missing("tiny", folder, results, runs, at_once=2, until=float("inf"))
    assert sorted(places.values()) == ["1", "1", "3", "3"]
    assert "gspo-0 ends with status 1:\nno such thing" in capsys.readouterr().out
    assert set(evidence.lacking("tiny", results, runs)) >= {evidence.Run("gspo", 0)}
    documents = evidence.documents_in(results, "tiny").values()
    assert sorted(each["run"] for document in documents for each in document["rows"]) == ["cispo", "trl", "trl"]
    evidence.missing("tiny", folder, results, [evidence.Run("dapo", 0)], at_once=2, until=0)
    assert evidence.Run("dapo", 0) not in places  # the time was over


def test_each_table_stands_between_its_marks_and_says_how_long_a_run_went_as_the_plain_one():
    document = {"base": {"accuracy": 0.3}, "rows": [row("logitless", 0, 3), row("trl", 0, 3)]}
    document["rows"][1]["reward"] = [0.5, 0.5, 0.2]
    name = "evidence-tiny-comparison"
    page = f"# Page\n\n<!-- {name}: begin -->\nold\n<!-- {name}: end -->\nrest\n"
    written = evidence.with_tables(page, {name: document, "evidence-tiny-ablations": document})
    assert "| logitless | 0 | 3 | 0.300 to 0.900 | 0.500 | 0.500 |  | 2.00 s | 6 s | no |" in written
    assert "| trl | 0 | 3 | 0.300 to 0.900 | 0.400 | 0.400 | 2 | 2.00 s | 6 s | no |" in written
    assert "old" not in written
    assert written.endswith(f"<!-- {name}: end -->\nrest\n")
    assert evidence.with_tables(written, {name: document}) == written


def test_the_verdict_is_the_difference_of_the_means_with_students_interval_and_the_ratio_of_runs_alone():
    rows = [row(name, seed, 2) | {"run_seconds": 7.0} for name in ("logitless", "trl") for seed in (0, 1, 2)]
    for each, accuracy in zip(rows, (0.80, 0.82, 0.84, 0.83, 0.85, 0.87), strict=True):
        each["accuracy"] = accuracy
    assert "TRL / logitless" not in evidence.verdict({"rows": rows})  # none had a device alone
    for each in rows:
        each |= {"at_once": 1, "train_seconds": 12.0 if each["run"] == "trl" else 4.0}
    text = evidence.verdict({"rows": rows})
    # both spreads 0.02: 2.776 * sqrt(0.0004 * 2 / 3) = 0.0453
    assert "| Held out, at the end | 0.820 ± 0.020 | 0.850 ± 0.020 | +0.030 ± 0.045 |" in text
    assert "| All blocks | 4.00 s | 12.00 s | 3.0 |" in text
    assert evidence.verdict({"rows": rows[:4]}) == ""  # one seed of TRL has no spread


@pytest.mark.parametrize("size", evidence.SIZES)
def test_the_page_shows_what_was_measured_of_runs_that_all_began_with_the_same_weights(size):
    documents = evidence.documents_in(evidence.RESULTS, size)
    page = evidence.PAGE.read_text()
    assert evidence.with_tables(page, documents) == page
    for document in documents.values():
        assert {each["base"] for each in document["rows"]} == {document["base"]["digest"]}
        assert all(len(each["block_seconds"]) == len(each["reward"]) for each in document["rows"])


def test_the_page_may_say_that_the_curves_are_the_same_within_the_noise_of_seeds():
    document = evidence.documents_in(evidence.RESULTS, "116m")["evidence-116m-comparison"]
    assert document["base"]["parameters"] > 100e6
    for measure in evidence.MEASURES.values():
        apart, half = evidence.difference(*([measure(row) for row in rows] for rows in evidence.seeds_of(document)))
        assert abs(apart) < half
        assert half < 0.06  # else the interval says little


def test_the_page_may_say_how_far_ablations_go_from_the_run_with_the_same_prompts():
    rows = [row for document in evidence.documents_in(evidence.RESULTS, "116m").values() for row in document["rows"]]
    curves = {(row["run"], row["seed"]): evidence.five_blocks(torch.tensor(row["reward"])) for row in rows}
    apart = {key: float((curve - curves["logitless", 0]).abs().max()) for key, curve in curves.items()}
    assert max(apart["logitless", seed] for seed in (1, 2)) == pytest.approx(0.062, abs=5e-4)
    assert apart["trl", 0] < 0.03
    ablations = {name: far for (name, _), far in apart.items() if name not in evidence.CONTENDERS}
    assert set(ablations) == set(evidence.ABLATIONS)
    assert ablations.pop("cispo") == pytest.approx(0.12, abs=5e-3)
    assert ablations.pop("ppo") == pytest.approx(0.08, abs=5e-3)
    assert max(ablations.values()) < 0.055
    assert ablations.pop("every saving off") < 0.05
    assert max(ablations[f"{name} off"] for name in evidence.SAVINGS[:3]) < 0.04


def test_the_page_may_say_at_which_block_a_switch_of_savings_draws_another_letter():
    documents = evidence.documents_in(evidence.RESULTS, "116m")
    rewards = {(row["run"], row["seed"]): row["reward"] for document in documents.values() for row in document["rows"]}
    plain = rewards["logitless", 0]
    for name, blocks in (("share_prompts", 1), ("leave_out_dead", 3), ("pack_by_cost", 9)):
        other = rewards[f"{name} off", 0]
        assert other[:blocks] == plain[:blocks]
        assert other[blocks] != plain[blocks]
