"""Rewards that fail are heard of at once: what is said, when, and how often."""

import json
import re

import pytest

from logitless.cli.main import main
from logitless.errors import ConfigurationError, TrainingError
from logitless.rewards.math import Math
from logitless.rewards.reward import weighted
from logitless.rewards.text.length import Length
from logitless.rewards.user_function import Function
from logitless.rewards.workers.pooled import hit_deadline
from logitless.train.collect.failures import MOST_KINDS, Failures
from logitless.train.plan.run_plan import dry_run
from logitless.train.recipe.loading import dump_recipe
from logitless.train.record.run_folder import RunFolder
from logitless.train.report.page import write_report
from logitless.types import Verdict
from tests.train.groups import FINE
from tests.train.groups import verdicts_of as block
from tests.train.tiny import start, tiny_recipe

PICKY = """\
def picky(completions, **columns):
    if sum(map(ord, completions[0])) % 5 < 2:
        raise KeyError("no such word")
    return [float(len(completions[0]))]


def fails_held_out(prompts, completions):
    if prompts[0] == "bca":
        raise KeyError("no answer to bca")
    return [float(len(completions[0]))]


def needs_a_column(completions, anwser):
    return [1.0]
"""


def error(message: str) -> Verdict:
    return Verdict(score=None, status="error", message=message, traceback=f"Traceback\n{message}")


def failures(reward=None):
    return Failures(weighted([Length(label="other"), reward or Length(label="mine")]))


def picky_recipe(folder, **changes):
    (folder / "rewards.py").write_text(PICKY)
    own = {"name": "function", "path": f"{folder}/rewards.py:picky"}
    settings = {"kl": None, "train__epochs_per_block": 1, "train__tokens_per_step": 1000, "train__blocks": 9}
    return tiny_recipe(folder, **{**settings, "rewards": [own], **changes})


def test_the_first_of_each_kind_of_error_is_shown_once_with_its_traceback():
    seen = failures()
    first = seen.new(block(FINE, error("raised: KeyError: 'a'"), error("raised: KeyError: 'b'")))
    assert first == [
        "reward 'mine' failed at 2 of 3 completions (error): raised: KeyError: 'a'\nTraceback\nraised: KeyError: 'a'"
    ]
    [second] = seen.new(block(error("raised: KeyError: 'c'"), error("raised: TypeError: no")))
    assert second.startswith("reward 'mine' failed at 1 of 2 completions (error): raised: TypeError: no")
    assert seen.new(block(error("raised: KeyError: 'a'"), error("raised: TypeError: no"))) == []


def test_messages_that_all_differ_are_shown_so_many_times():
    assert len(failures().new(block(*(error(f"kind {n}") for n in range(9))))) == MOST_KINDS


def test_what_is_missing_or_graded_or_wrong_is_no_failure():
    said = [FINE, Verdict(score=None, status="missing"), Verdict(score=0.0, status="ungradable", message="brackets")]
    assert failures().new(block(*said)) == []


def deadlines(seen, *verdicts):
    return [message for message in seen.new(block(*verdicts)) if "deadline" in message]


@pytest.mark.parametrize(
    "hit",
    [
        Verdict(score=0.0, status="ungradable", message="timeout: over 0.5 s (signal SIGKILL)"),
        Verdict(score=0.0, status="ungradable", message="timeout: it slept for 0.5 s"),
        Verdict(score=None, status="timeout", message="over 0.5 s (signal SIGKILL)"),
    ],
)
def test_a_deadline_that_most_completions_hit_is_named_once_with_its_seconds_and_its_key(hit):
    seen = failures(Function(path="math:fsum", label="mine", deadline_seconds=0.5))
    assert not deadlines(seen, hit, FINE)  # half is not most
    unscored = 2 * (hit.score is None)
    assert deadlines(seen, hit, hit, FINE) == [
        "reward 'mine': 2 of 3 completions hit its deadline of 0.5 s and were not graded: "
        f"{unscored} have no score, {2 - unscored} that of a wrong answer. What a call imports or loads, load "
        "at the top of its file: no deadline counts that. If the reward needs longer, raise rewards.1.deadline_seconds."
    ]
    assert not deadlines(seen, hit, hit)
    without_a_file = failures(Math(label="mine", deadline_seconds=0.5))
    assert "wrong answer. If the reward needs longer" in deadlines(without_a_file, hit)[0]


@pytest.mark.parametrize(
    ("body", "status"), [("time.sleep(60)", "timeout"), ("while True: pass", "ungradable")], ids=["sleeps", "computes"]
)
def test_the_verdicts_of_workers_at_their_deadline_are_known_as_such(body, status, tmp_path):
    (tmp_path / "slow.py").write_text(f"import time\n\ndef slow(completions):\n    {body}\n")
    reward = Function(path=f"{tmp_path}/slow.py:slow", deadline_seconds=0.2)
    [verdict] = reward.verdicts(["p"], ["c"], {})
    assert (verdict.status, hit_deadline(verdict)) == (status, True)


def test_a_traceback_begins_in_the_code_of_the_user(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def inner():\n    return {}['gold']\n\ndef mine(completions):\n    return inner()\n"
    )
    [verdict] = Function(path=f"{tmp_path}/mine.py:mine").verdicts(["p"], ["c"], {})
    files = re.findall(r'File "(.*?)"', verdict.traceback)
    assert files == [f"{tmp_path}/mine.py"] * 2


def test_a_reward_that_raises_on_some_completions_is_shown_at_once_counted_in_each_line_and_ends_the_run_with_a_summary(
    tmp_path, capsys
):
    with pytest.raises(TrainingError, match=r"(?s)by picky, and as bad for 3 blocks.*rewards.py.*KeyError"):
        start(picky_recipe(tmp_path))
    out = capsys.readouterr().out
    assert out.count("Traceback") == 1
    assert re.search(r"(?s)reward 'picky' failed at \d+ of \d+ completions.*rewards\.py.*block 1/9  step 1", out)
    assert len(re.findall(r"block \d/9.*picky failed at \d+%", out)) == 2  # the third block ends the run
    folder = RunFolder(tmp_path / "runs" / "tiny")
    summary = json.loads(folder.summary.read_text())
    assert summary["ended_by"] == "error"
    assert summary["verdicts/picky"] == summary["completions"] == 3 * 16  # also of the block that ended it
    assert 0.25 * 16 < summary["failed_verdicts/picky"] == 3 * 16 - summary["scored_completions"] < 3 * 16
    write_report(folder.path)
    assert "failed: needed at most 25% of completions unscored" in folder.report.read_text()


def test_the_summary_and_the_last_lines_have_the_share_of_completions_that_a_reward_failed_at(tmp_path, capsys):
    recipe = picky_recipe(tmp_path, train__max_unscored_fraction=1.0, train__blocks=4)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    assert main(["train", str(tmp_path / "recipe.yaml")]) == 0
    folder = RunFolder(tmp_path / "runs" / "tiny")
    summary = json.loads(folder.summary.read_text())
    assert summary["verdicts/picky"] == 4 * 16
    failed = sum(line.get("verdict/picky/error", 0) for line in folder.read_metrics())
    assert 0 < summary["failed_verdicts/picky"] == failed < 4 * 16
    shares = [line["verdict/picky/failed_fraction"] for line in folder.read_metrics() if "reward/mean" in line]
    assert sum(shares) * 16 == failed
    assert f"picky: {failed} of 64 completions ({failed / 64:.0%})" in capsys.readouterr().out


def test_a_reward_that_fails_only_at_held_out_completions_is_in_every_line_the_summary_the_last_lines_and_the_report(
    tmp_path, capsys
):
    rewards = [{"name": "function", "path": f"{tmp_path}/rewards.py:fails_held_out"}]
    held_out = [{"id": text, "prompt": text} for text in ("ca", "bca")]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    data = {"name": "file", "path": str(tmp_path / "asked.jsonl")}
    evaluation = {"every_blocks": 1, "sets": {"more": {"data": data, "every_blocks": 1}}}
    recipe = picky_recipe(tmp_path, rewards=rewards, train__blocks=1, data__held_out=data, evaluation=evaluation)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    assert main(["train", str(tmp_path / "recipe.yaml")]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"held-out accuracy \S+ \(50% not scored\).* more accuracy \S+ \(50% not scored\)", out)) == 2
    assert len(re.findall(r"^  (?:held-out|more) accuracy .* \(50% not scored\)$", out, re.MULTILINE)) == 2
    assert (
        "  failed reward      fails_held_out: at held-out completions, the first by KeyError: 'no answer to bca'" in out
    )
    assert re.search("^next: .* doctor ", out, re.MULTILINE)
    folder = RunFolder(tmp_path / "runs" / "tiny")
    summary = json.loads(folder.summary.read_text())
    assert (summary["unscored_fraction_after"], summary["unscored_fraction_after/more"]) == (0.5, 0.5)
    write_report(folder.path)
    assert "50%, more: 50%</div><div>held-out completions not scored" in folder.report.read_text()


def test_what_a_reward_leaves_out_on_purpose_needs_no_repair(tmp_path, capsys, monkeypatch):
    def verdicts(_reward, prompts, *_):
        return [Verdict(None, "missing") if prompt == "ca" else Verdict(1.0, "graded") for prompt in prompts]

    monkeypatch.setattr(Length, "verdicts", verdicts)
    recipe = tiny_recipe(tmp_path, rewards=[{"name": "length"}], train__blocks=1)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    assert main(["train", str(tmp_path / "recipe.yaml")]) == 0
    out = capsys.readouterr().out
    assert "  held-out accuracy  not scored" in out
    assert "failed reward" not in out
    assert not re.search("^next: .* doctor ", out, re.MULTILINE)


@pytest.mark.parametrize(("late", "repaired_first"), [(0, False), (6, False), (9, True)])
def test_the_last_lines_have_the_share_of_completions_that_hit_a_deadline(
    tmp_path, capsys, monkeypatch, late, repaired_first
):
    calls = iter(range(1000))
    over = Verdict(0.0, "ungradable", message="timeout: over 2 s (signal SIGKILL)")

    def verdicts(_reward, _prompts, completions, *_):
        return [over if next(calls) % 16 < late else Verdict(1.0, "graded") for _ in completions]

    monkeypatch.setattr(Length, "verdicts", verdicts)
    recipe = tiny_recipe(tmp_path, rewards=[{"name": "length"}], train__blocks=2, data__held_out=None)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    assert main(["train", str(tmp_path / "recipe.yaml")]) == 0
    out = capsys.readouterr().out
    assert (f"  deadline hit       length: {2 * late} of 32 completions ({late / 16:.0%})" in out) == (late > 0)
    assert bool(re.search("^next: .* doctor ", out, re.MULTILINE)) == repaired_first


def test_an_argument_that_is_no_column_is_refused_before_the_start_and_in_a_dry_run(tmp_path):
    own = [{"name": "function", "path": f"{tmp_path}/rewards.py:needs_a_column"}]
    for begin in (start, dry_run):
        with pytest.raises(ConfigurationError, match=r"a column of the data \(answer\); given anwser"):
            begin(picky_recipe(tmp_path, rewards=own))
    assert not (tmp_path / "runs").exists()


def test_doctor_reports_the_verdicts_of_the_batch_that_it_measured(tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(picky_recipe(tmp_path)))
    assert main(["doctor", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    said = re.fullmatch(
        r"(\d+) graded, 0 ungradable, (\d+) error, 0 timeout, 0 missing; failed at (\d+)%", found["verdicts"]["picky"]
    )
    assert int(said[1]) + int(said[2]) == 16
    assert found["rewards that failed"][0].count("KeyError") >= 1
    assert f"failed at {said[2]} of 16 completions" in found["rewards that failed"][0]
