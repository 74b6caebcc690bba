"""The comparison with TRL and the ablations: their data, their measure, their recipes."""

import pytest
import torch

import evidence
from logitless.models.loading import load_model
from logitless.train.learn.policy import Policy
from logitless.types import LMHead

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
