"""What ``benchmarks/tinker_recipes.py`` asks and reads; the recipes themselves run in tests/tinker/test_cookbook.py."""

import json

import tinker_recipes
from tinker_recipes import LOOP, byte_tokenizer, digits, reward, seen


def test_tokens_that_speak_are_rewarded_by_chance_and_no_text_is_read_as_one():
    tokenizer = byte_tokenizer(speaking=300)
    assert len(tokenizer) == 300
    texts = tokenizer.batch_decode([[i] for i in range(265, 300)])
    assert texts[:2] == ["Guess: 265\n\\boxed{5} 265 64\n", "\\boxed{6} 266 65\n"]
    assert len(set(texts)) == len(texts)
    assert len(tokenizer(texts[0])["input_ids"]) == len(texts[0])
    assert reward(texts[:2], ["5", "5"]) == [1.0, 0.0]
    assert reward(["\\boxed{1} \\boxed{2}", "2"], ["2", "2"]) == [1.0, 0.0]
    assert {len(row["question"]) for row in digits(320)} == {155}


def test_a_row_holds_every_step_the_largest_kl_and_the_speed_without_the_first_steps(tmp_path):
    lines = [{"train_mean_nll": 1.0, "time_total": 9.0}]
    lines += [{"reward/total": 0.25, "time/total": float(n), "optim/kl_sample_train_v1": -n / 8} for n in (1, 2, 4)]
    lines += [{"progress/done": 1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = seen(LOOP._replace(tokens=80), tmp_path, 1)
    assert found["steps"] == 3
    assert found["reward"] == [0.25] * 3
    assert found["step_seconds"] == [1.0, 2.0, 4.0]
    assert (found["kl"], found["tokens_per_second"]) == (0.5, 20)
    assert seen(LOOP, tmp_path / "none", 0) == {"steps": 0, "tokens": []}


def test_settings_are_changed_by_name():
    assert LOOP.smaller("batch_size=4 more=1").command[-2:] == ["max_steps=5", "more=1"]
    assert "batch_size=4" in LOOP.smaller("batch_size=4").command
    assert tinker_recipes.MODELS["tiny"].alone[0].tokens == 4 * 4 * 16
