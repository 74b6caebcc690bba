"""The comparison with TRL and the ablations: their data, their measure, their recipes."""

from types import SimpleNamespace

import pytest
import torch

import evidence
from logitless.models.loading import load_model
from logitless.train.learn.policy import Policy

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


def test_trl_trains_without_cudnns_attention_whose_gradient_has_nan_and_the_process_is_left_as_it_was():
    before, seen = torch.backends.cuda.cudnn_sdp_enabled(), []
    trainer = SimpleNamespace(train=lambda: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    assert evidence.train_in_trl(trainer) == ["flash", "efficient", "math"]
    assert (seen, torch.backends.cuda.cudnn_sdp_enabled()) == ([False], before)
