"""A run on several sources, with rewards of their own, and on several held-out sets."""

import json

import pytest

from logitless.cli.main import main
from logitless.errors import ConfigurationError, DataError
from logitless.rewards.reward import judge, weighted
from logitless.rewards.text.exact import Exact
from logitless.rewards.text.length import Length
from logitless.train.assembly.data import data_of, order_of, rewards_of
from logitless.train.assembly.model import tokenizer_of
from logitless.types import Completion, Episode, Prompt
from tests.train.test_distillation import teacher_in
from tests.train.tiny import completed, repeated, start, tiny_recipe


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"name": "file", "path": str(path)}


def mixture(folder, **changes):
    """Pairs of which three quarters of a block are, with a reward for length, and single letters, with one for text."""
    tiny_recipe(folder)  # its files
    letters = written(folder / "letters.jsonl", [{"prompt": letter, "answer": letter} for letter in "abcdefgh"])
    pairs = {"name": "file", "path": str(folder / "train.jsonl")}
    hard = {
        "data": written(folder / "hard.jsonl", [{"prompt": 3 * letter, "answer": letter} for letter in "ab"]),
        "samples_per_prompt": 4,
        "sampling": {"max_new_tokens": 3, "temperature": 1.0},
        "success_at": 2.0,
        "every_blocks": 1,
    }
    rewards = [
        {"name": "length", "cap": 6, "sources": ["pairs", "held_out", "hard"]},
        {"name": "exact", "column": "answer", "sources": ["letters"]},
    ]
    sources = {"pairs": {"weight": 3, "data": pairs}, "letters": {"data": letters}}
    raw = {
        "data__train": {"name": "mixture", "sources": sources},
        "evaluation": {"every_blocks": 2, "sets": {"hard": hard}},
        "rewards": rewards,
        "kl": None,
        "train__epochs_per_block": 1,
    }
    return tiny_recipe(folder, **{**raw, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return completed(mixture(tmp_path_factory.mktemp("mixture")))


def test_prompts_carry_their_source_and_ids_that_differ(tmp_path):
    recipe = mixture(tmp_path)
    data = data_of(recipe, tokenizer_of(recipe.model))
    assert [prompt.id for prompt in data.train[:1] + data.train[-1:]] == ["pairs/0", "letters/7"]
    assert {prompt.source for prompt in data.train} == {"pairs", "letters"}
    assert [prompt.source for prompt in data.judged[-3:]] == ["held_out", "hard", "hard"]
    assert set(data.counts) == {"pairs", "letters", "held_out", "hard"}


def test_texts_of_every_held_out_set_are_left_out_of_every_source(tmp_path):
    recipe = mixture(tmp_path)
    (tmp_path / "hard.jsonl").write_text('{"prompt": "a", "answer": "a"}\n{"prompt": "ah", "answer": "b"}\n')
    data = data_of(recipe, tokenizer_of(recipe.model))
    assert not {prompt.text for prompt in data.train} & {"a", "ah"}
    assert (data.counts["pairs"]["held_out"], data.counts["letters"]["held_out"]) == (1, 1)


def test_a_source_too_small_for_its_share_is_refused_before_anything_is_loaded(tmp_path):
    recipe = mixture(tmp_path)
    (tmp_path / "letters.jsonl").write_text('{"prompt": "a", "answer": "a"}\n')
    with pytest.raises(DataError, match="the source 'letters'"):
        data_of(recipe, tokenizer_of(recipe.model))


def test_each_reward_is_checked_against_the_rows_that_it_judges(tmp_path):
    recipe = mixture(tmp_path)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("ab", "cd", "ef", "gh")))
    data = data_of(recipe, tokenizer_of(recipe.model))
    assert rewards_of(recipe, data.judged)  # pairs have no answer, and exact does not read them
    everything = mixture(tmp_path, rewards=[{"name": "exact", "column": "answer"}])
    with pytest.raises((ConfigurationError, DataError)):
        rewards_of(everything, data.judged)


def test_a_prompt_is_judged_by_the_rewards_of_its_source_alone():
    rewards = weighted([Length(sources=("long",)), Exact(sources=("short", "both")), Length(label="all", weight=0.5)])
    prompts = [Prompt(name, "?", (1,), {"answer": "yes"}, source=name) for name in ("long", "short")]
    episodes = [[Episode(Completion(p.id, (4, 5), "yes", "stop"), ())] for p in prompts]
    long, short = judge(prompts, episodes, rewards, unscored="drop")
    assert (list(long.verdicts[0]), list(short.verdicts[0])) == (["length", "all"], ["exact", "all"])
    assert (long.rewards, short.rewards) == ((3.0,), (2.0,))


def test_every_block_has_its_shares_and_metrics_of_each_source(finished):
    blocks = [record for record in finished.read_metrics() if "source/pairs/prompts" in record]
    assert [(r["source/pairs/prompts"], r["source/letters/prompts"]) for r in blocks] == [(3, 1)] * 3
    for record in blocks:
        assert 0 <= record["source/letters/reward_mean"] <= 1 <= record["source/pairs/length_mean"]
        whole = 3 / 4 * record["source/pairs/reward_mean"] + record["source/letters/reward_mean"] / 4
        assert record["reward/mean"] == pytest.approx(whole)


def test_each_held_out_set_is_judged_by_its_own_settings_at_its_own_times(finished):
    records = finished.read_metrics()
    hard = [record for record in records if "held_out/hard/accuracy" in record]
    assert [record["block"] for record in hard] == [1, 1, 2, 3]
    assert [record["block"] for record in records if "evaluation/accuracy" in record] == [1, 2, 3]
    for record in hard:
        assert record["held_out/hard/prompts"] == 2
        assert record["held_out/hard/length_mean"] <= 3
        chances = [record[f"held_out/hard/{name}"] for name in ("accuracy", "pass_at/2", "pass_at/4")]
        assert chances == sorted(chances)
        assert record["held_out/hard/pass_at/4/low"] <= record["held_out/hard/pass_at/4"]
        assert "evaluation/pass_at/2" not in record  # of the set of the data section there is one sample
    summary = json.loads(finished.summary.read_text())
    assert summary["accuracy_after/hard"] == hard[-1]["held_out/hard/accuracy"]


def test_rows_name_their_source(finished):
    _, rows = next(finished.read_rollouts())
    assert {(row["source"], row["prompt_id"].partition("/")[0]) for row in rows} == {
        ("pairs", "pairs"),
        ("letters", "letters"),
    }
    assert all((row["reward/length"] is None) == (row["source"] == "letters") for row in rows)


def test_a_run_that_was_stopped_goes_on_as_the_whole_one(tmp_path, finished):
    start(mixture(tmp_path, train__blocks=1))
    resumed = completed(mixture(tmp_path), resume=True)

    def numbers(run):  # a run of one block is judged at its end; one of three is not, there
        return [{n: v for n, v in r.items() if not n.startswith("evaluation/")} for r in repeated(run)]

    assert numbers(resumed) == numbers(finished)


def test_shares_hold_over_a_run_and_each_rank_draws_the_same(tmp_path):
    recipe = mixture(tmp_path, rollout__prompts_per_block=5)
    data = data_of(recipe, tokenizer_of(recipe.model))
    one, other = order_of(recipe, data.train), order_of(recipe, data.train)
    drawn = [one.next(5) for _ in range(8)]
    assert drawn == [other.next(5) for _ in range(8)]
    assert sum(data.train[index].source == "pairs" for block in drawn for index in block) == 30


def test_sampling_from_a_mixture_takes_the_template_of_a_source(finished, capsys):
    assert main(["sample", str(finished.path), "--prompt", "ab"]) == 0  # all sources render alike
    assert main(["sample", str(finished.path), "--prompt", "ab", "--source", "digits"]) == 2
    assert "--source" in capsys.readouterr().err


def test_the_report_has_curves_of_every_set_and_source(finished):
    text = finished.report.read_text()
    for title, label in (("Reward by source", "letters"), ("Held-out accuracy", "hard"), ("pass@k", "hard pass@4")):
        card = text.partition(f"<h3>{title}</h3>")[2].partition("<h3>")[0]
        assert label in card, title


def test_each_source_of_data_has_its_teacher_and_one_without_is_refused(tmp_path):
    teacher = {"source": {"pairs": "start", "letters": teacher_in(tmp_path)}, "advantage": True, "alone": True}
    once = {"train__blocks": 1, "rollout__zero_signal": "keep"}
    run = completed(mixture(tmp_path, **once, teacher=teacher))
    largest = {"pairs": 0.0, "letters": 0.0}
    for _, rows in run.read_rollouts():
        for row in rows:
            source = row["prompt_id"].partition("/")[0]
            largest[source] = max(largest[source], abs(row["advantage"]))
    assert largest["pairs"] < 1e-5 < 0.01 < largest["letters"]  # the policy has not yet left its start
    del teacher["source"]["letters"]
    with pytest.raises(DataError, match="a teacher for each source of data: 'pairs'; given 'letters'"):
        start(mixture(tmp_path, **once, teacher=teacher, name="refused"))
