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


def test_a_run_that_is_there_is_not_repeated_and_rows_of_other_weights_are_refused(tmp_path):
    out = tmp_path / "evidence-comparison.json"
    names = evidence.CONTENDERS
    assert [(run.name, run.seed) for run in evidence.lacking(out, names, [0])] == [("logitless", 0), ("trl", 0)]
    rows = [{"run": "trl", "seed": 0, "base": "abc"}]
    out.write_text(json.dumps({"rows": rows}))
    assert [(run.name, run.seed) for run in evidence.lacking(out, names, [0])] == [("logitless", 0)]
    assert evidence.document_of(out, "tiny", {"digest": "abc"})["rows"] == rows
    with pytest.raises(SystemExit, match="other weights"):
        evidence.document_of(out, "tiny", {"digest": "abd"})


def test_runs_side_by_side_are_recorded_and_one_that_fails_is_not(tmp_path, monkeypatch, capsys):
    folder, out = tmp_path / "runs", tmp_path / "results" / "evidence-ablations.json"
    folder.mkdir()
    (folder / "base.json").write_text(json.dumps({"digest": "abc", "accuracy": 0.3}))
    script = tmp_path / "one.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "name, folder = sys.argv[sys.argv.index('--name') + 1], pathlib.Path(sys.argv[-1])\n"
        "if name == 'gspo': sys.exit('no such thing')\n"
        "(folder / 'rows').mkdir(exist_ok=True)\n"
        "row = {'reward': [0.5], 'block_seconds': [2.0], 'train_seconds': 2.0, 'accuracy': 0.9}\n"
        "(folder / 'rows' / f'{name}-0.json').write_text(json.dumps(row))\n"
    )
    monkeypatch.setattr(evidence, "__file__", str(script))
    runs = [evidence.Run(out, name, 0) for name in ("cispo", "gspo")]
    evidence.missing("tiny", folder, runs, at_once=2)
    [row] = json.loads(out.read_text())["rows"]
    assert (row["run"], row["base"], row["at_once"], row["accuracy"]) == ("cispo", "abc", 2, 0.9)
    assert "gspo, seed 0: not recorded" in (printed := capsys.readouterr().out)
    assert "no such thing" in printed
