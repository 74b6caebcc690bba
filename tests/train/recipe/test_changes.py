"""A run goes on with other keys where they change no trained bit, or rounding alone, and says so."""

import json
import re

import pytest

from logitless.errors import ConfigurationError
from logitless.objective import presets
from logitless.train.assembly.algorithm import algorithm_of
from logitless.train.recipe.changes import Change, changes, check_resumed, in_words, parts_per_micro_batch
from logitless.train.record.metrics import repeatable
from tests.train.interrupting import stopped_at
from tests.train.tiny import completed, finished_run, held_out_set, tiny_recipe

TRAINED = ("loss/", "optimizer/", "reward/", "kl_ref/", "entropy/", "ratio/")


def _trained(run):
    """What training did, without what was measured beside it."""
    return [
        {name: value for name, value in repeatable(record).items() if name.startswith(TRAINED)}
        for record in run.read_metrics()
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return finished_run(tmp_path_factory.mktemp("whole"))


AMID = 5


def test_evaluation_and_limits_may_change_and_change_no_trained_bit(whole, tmp_path, capsys):
    folder = stopped_at(AMID, tiny_recipe(tmp_path))
    new = {
        "evaluation__every_blocks": 1,
        "evaluation__samples_per_prompt": 2,
        "evaluation__sampling": {"max_new_tokens": 5},
        "evaluation__sets": held_out_set(tmp_path),
        "writers": [{"name": "tensorboard"}],
        "train__max_blocks_without_signal": 7,
        "train__max_skipped_in_a_row": 9,
    }
    completed(tiny_recipe(tmp_path, **new), resume=True)
    assert _trained(folder) == _trained(whole)
    assert folder.read_metrics()[-1]["held_out/more/prompts"] == 1
    changed = json.loads(folder.provenance.read_text())["starts"][1]["changed"]
    assert changed["evaluation.every_blocks"] == {"from": 2, "to": 1, "rounding": False}
    assert {"train.max_skipped_in_a_row", "writers"} <= changed.keys()
    said = capsys.readouterr().out
    assert "changed: evaluation.every_blocks from 2 to 1" in said
    assert "last bits may differ" not in said


def test_micro_batches_may_change_with_a_message_and_change_rounding_alone(whole, tmp_path, capsys):
    folder = stopped_at(AMID, tiny_recipe(tmp_path))
    completed(tiny_recipe(tmp_path, train__tokens_per_micro_batch=64), resume=True)
    found, wanted = _trained(folder), _trained(whole)
    assert len(found) == len(wanted)
    assert found[:6] == wanted[:6]
    for record, other in zip(found, wanted, strict=True):
        for name, value in other.items():
            if not re.search("micro_batch|rows|padding|halvings", name):
                assert record[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert found[-1]["optimizer/micro_batches"] < wanted[-1]["optimizer/micro_batches"]
    changed = json.loads(folder.provenance.read_text())["starts"][1]["changed"]
    assert changed == {"train.tokens_per_micro_batch": {"from": 32, "to": 64, "rounding": True}}
    assert "last bits may differ from those without the change: train.tokens_per_micro_batch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train__tokens_per_step", 80),
        ("train__epochs_per_block", 1),
        ("train__optimizer", {"learning_rate": 0.5}),
        ("rollout__sampling", {"max_new_tokens": 5}),
        ("rewards", [{"name": "length", "cap": 5}]),
        ("seed", 1),
    ],
)
def test_a_key_that_makes_another_run_is_refused_by_its_name(tmp_path, key, value):
    before, after = tiny_recipe(tmp_path), tiny_recipe(tmp_path, **{key: value})
    with pytest.raises(ConfigurationError, match=rf"another {key.replace('__', '.')}.*--fork"):
        check_resumed(before, after, algorithm_of(after), can_fork=lambda: True)


def test_a_refused_resume_gives_every_changed_key_with_the_runs_value_and_the_recipes(tmp_path):
    before = tiny_recipe(tmp_path, rewards=[{"name": "length", "cap": 4}])
    after = tiny_recipe(tmp_path, rewards=[{"name": "length", "cap": 5}], seed=7, kl=None)
    with pytest.raises(ConfigurationError) as refused:
        check_resumed(before, after, algorithm_of(after), can_fork=lambda: False)
    said = str(refused.value)
    assert f"seed (7, not {before.seed})" in said
    assert "kl (none, not {" in said
    for cap in (4, 5):  # of a long value the part that differs is shown
        assert f"'cap': {cap}" in said


def test_micro_batches_that_the_loss_looks_at_may_not_change(tmp_path):
    parts = {"algorithm": {"entropy_bonus": {"coefficient": 0.1, "scope": "micro_batch"}}}
    for other in ({"train__tokens_per_micro_batch": 64}, {"train__share_prompts": False}):
        before, after = tiny_recipe(tmp_path, **parts), tiny_recipe(tmp_path, **parts, **other)
        with pytest.raises(ConfigurationError, match=r"on which algorithm\.entropy_bonus depends"):
            check_resumed(before, after, algorithm_of(after), can_fork=lambda: True)
    assert parts_per_micro_batch(presets.grpo()) == []


def test_halvings_of_the_earlier_size_are_over_once_the_size_is_set_anew(tmp_path):
    folder = stopped_at(AMID, tiny_recipe(tmp_path))
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    for line in lines[3:]:
        line["optimizer/halvings"] = 1
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    smaller = tiny_recipe(tmp_path, train__tokens_per_micro_batch=16)
    stopped_at(7, smaller, resume=True)
    completed(smaller, resume=True)
    later = [line for line in folder.read_metrics() if line["step"] > 5 and "optimizer/halvings" in line]
    assert {line["optimizer/halvings"] for line in later} == {0}
    assert {line["optimizer/tokens_per_micro_batch"] for line in later} == {16}


def test_changes_are_named_by_key_in_order_and_lists_as_a_whole(tmp_path):
    before = tiny_recipe(tmp_path)
    after = tiny_recipe(tmp_path, writers=["tensorboard"], train__optimizer={"learning_rate": 0.5}, kl=None)
    assert [change.key for change in changes(before, after)] == ["kl", "train.optimizer.learning_rate", "writers"]
    assert in_words([]) == []
    assert not Change(("train", "blocks"), 1, 2).is_below(["train.blocks_more", "train.blocks.inner"])
