"""The comparison with TRL and the ablations: their data, their measure, their recipes."""

import importlib.util
import json
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


def test_runs_of_a_process_that_fail_are_left_out_and_those_after_them_are_made(tmp_path, monkeypatch):
    folder = folder_with(tmp_path / "a")
    (folder / "held_out.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ROWS))

    def run(size, folder, name, seed):
        if name == "gspo":
            raise ValueError("no such thing")
        return {"reward": [0.5], "block_seconds": [2.0], "weights": name}

    monkeypatch.setattr(evidence, "logitless_run", run)
    monkeypatch.setattr(evidence, "policy_from", lambda weights: weights)
    monkeypatch.setattr(evidence, "accuracy", lambda policy, pairs: 0.9)
    runs = [evidence.Run.of(text) for text in ("gspo:0", "cispo:0")]
    evidence.work("tiny", folder, runs, at_once=2, until=float("inf"))
    [path] = folder.glob("rows/*")
    assert json.loads(path.read_text()) == row("cispo", 0, 1) | {"reward": [0.5]}
    evidence.work("tiny", folder, [evidence.Run("dapo", 0)], at_once=2, until=0)
    assert len(list(folder.glob("rows/*"))) == 1


def test_each_table_stands_between_its_marks(tmp_path):
    document = {"base": {"accuracy": 0.3}, "rows": [row("trl", 0, 3)]}
    name = "evidence-tiny-comparison"
    page = f"# Page\n\n<!-- {name}: begin -->\nold\n<!-- {name}: end -->\nrest\n"
    written = evidence.with_tables(page, {name: document, "evidence-tiny-ablations": document})
    assert "| trl | 0 | 3 | 0.300 to 0.900 | 0.500 | 2.00 s | 6 s | 2 |" in written
    assert "old" not in written
    assert written.endswith(f"<!-- {name}: end -->\nrest\n")
    assert evidence.with_tables(written, {name: document}) == written


@pytest.mark.parametrize("size", evidence.SIZES)
def test_the_page_shows_what_was_measured_of_runs_that_all_began_with_the_same_weights(size):
    documents = evidence.documents_in(evidence.RESULTS, size)
    page = evidence.PAGE.read_text()
    assert evidence.with_tables(page, documents) == page
    for document in documents.values():
        assert {each["base"] for each in document["rows"]} == {document["base"]["digest"]}
        assert all(len(each["block_seconds"]) == len(each["reward"]) for each in document["rows"])
