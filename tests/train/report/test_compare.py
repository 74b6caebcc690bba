"""Several runs on one page."""

from pathlib import Path

import pytest

from logitless.cli.main import main
from logitless.errors import ConfigurationError
from logitless.train.report import compare
from logitless.train.report.compare import write_comparison
from tests.train.fake_run import fake_run


def test_each_run_is_a_line_of_every_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [fake_run(tmp_path, num_blocks=3, seed=seed).path for seed in range(3)]
    drawn = {}
    monkeypatch.setattr(compare.Curves, "card", lambda self, lines: drawn.update({self.title: lines}) or "")
    write_comparison(folders, tmp_path / "page.html")
    assert [line.label for line in drawn["Reward"]] == [folder.name for folder in folders]
    assert {"Held-out accuracy", "KL to the reference", "Completion length"} <= set(drawn)


def test_ends_and_the_keys_that_differ_are_tables(tmp_path: Path) -> None:
    one, other = (fake_run(tmp_path, num_blocks=3, seed=seed) for seed in range(2))
    other.write_config(other.config.read_text().replace("seed: 0", "seed: 7") + "\ntrain: {blocks: 9}\n")
    text = write_comparison([one.path, other.path], tmp_path / "page.html").read_text()
    assert text.count("0.31 → ") == 2
    recipes = text.partition("<h2>Recipes</h2>")[2]
    assert "train.blocks" in recipes
    assert "reward" not in recipes


def test_the_command_writes_a_comparison_of_several_and_a_report_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(fake_run(tmp_path, num_blocks=2, seed=seed).path) for seed in range(2)]
    assert main(["report", *folders, "--out", str(tmp_path / "both.html")]) == 0
    assert (tmp_path / "both.html").is_file()
    assert main(["report", folders[0]]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "both.html"), f"{folders[0]}/report.html"]
    assert main(["report", folders[0], str(tmp_path / "no-run")]) == 2


def test_more_runs_than_colours_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="2 to 8 runs"):
        write_comparison([tmp_path] * 9, tmp_path / "page.html")
