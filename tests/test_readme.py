"""What the front pages show runs, and what they link to exists."""

import re
from pathlib import Path

import pytest
import torch
import yaml

import bits_report
import head_report
import logitless
import step_report
from logitless.cli.main import COMMANDS
from logitless.models.lm_head import lm_head
from logitless.train.recipe.loading import parse_recipe

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def fenced(language, number=0):
    """The fenced text of a language, the first one unless another number is given."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)[number]


def test_the_library_example_runs_and_its_log_probabilities_are_those_of_plain_logits():
    names = {}
    exec(fenced("python", 1), names)
    logits = names["hidden"].detach() @ lm_head(names["model"]).weight.detach().T
    expected = logits.log_softmax(-1).gather(1, names["packed"].target[:, None])[:, 0]
    torch.testing.assert_close(names["scores"].logp, expected)
    # Two answers with rewards 1 and 0: advantages of opposite sign, equal weight, ratio 1, so that the loss is 0.
    assert abs(names["loss"].item()) < 1e-6
    assert all(p.grad is not None and p.grad.isfinite().all() for p in names["model"].parameters())
    assert names["model"].lm_head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(("page", "words"), [("README.md", 1200), ("CONTRIBUTING.md", 900)])
def test_the_page_is_short(page, words):
    assert len((ROOT / page).read_text(encoding="utf-8").split()) <= words


def test_the_headline_figures_are_those_of_the_committed_results():
    steps = [
        (row["live"], row["over_trl"])
        for document in step_report.load(RESULTS)
        for row in document["rows"]
        if row["contender"] == "logitless" and row.get("over_trl") is not None
    ]
    (low, high), (half_low, half_high) = (
        (min(times), max(times)) for times in ([over for share, over in steps if share == live] for live in (1.0, 0.5))
    )
    assert f"| {low:.1f} to {high:.1f} times as fast |" in README
    assert f"| {half_low:.1f} to {half_high:.1f} times as fast |" in README
    llama = next(each for each in head_report.load(RESULTS) if each["shape"]["model"] == "Llama-3.1-8B")
    peaks = [
        head_report.pick(llama["rows"], contender, N=16384, trained="weight")["peak_bytes"] / 2**30
        for contender in ("logitless-fused", "logitless-reference")
    ]
    assert f"| {peaks[0]:.1f} instead of {peaks[1]:.1f} GiB |" in README
    laws = [
        row
        for document in bits_report.load(RESULTS, "bits")
        for row in document["rows"]
        if "comparison" in row and row.get("exact", True)
    ]
    assert f"| {sum(row['differ'] for row in laws)} of {sum(row['tokens'] for row in laws):,} |" in README


def test_the_recipe_is_valid():
    assert parse_recipe(yaml.safe_load(fenced("yaml"))).algorithm.preset == "dr_grpo"


def test_the_public_names_are_all_listed():
    listed = re.search(r"Public names: `([^`]*)`", README)[1]
    assert sorted(re.split(r",\s+", listed)) == sorted(logitless.__all__)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/dataflow.md"])
def test_every_command_and_make_target_that_a_page_shows_exists(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"^    logitless ([\w-]+)", text, re.MULTILINE)) <= set(COMMANDS)
    assert set(re.findall(r"^    make (\w+)", text, re.MULTILINE)) <= set(targets)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/dataflow.md"])
def test_every_module_that_a_page_names_exists(page):
    folders = "objective|head|models|data|rewards|rollout|train|distributed"
    named = re.findall(rf"(?<![\w/])((?:{folders})/\w+\.py)\b", (ROOT / page).read_text(encoding="utf-8"))
    assert [module for module in named if not (ROOT / "src/logitless" / module).exists()] == []
