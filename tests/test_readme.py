"""What the front pages show runs, and what they link to exists."""

import re
from pathlib import Path

import pytest
import torch
import yaml

import logitless
from logitless.cli.main import COMMANDS
from logitless.models.lm_head import lm_head
from logitless.train.recipe import parse_recipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def fenced(language, number=0):
    """The fenced text of a language, the first one unless another number is given."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)[number]


def test_the_library_example_runs_and_its_log_probabilities_are_those_of_plain_logits():
    names = {}
    exec(fenced("python"), names)
    logits = names["hidden"].detach() @ lm_head(names["model"]).weight.detach().T
    expected = logits.log_softmax(-1).gather(1, names["packed"].target[:, None])[:, 0]
    torch.testing.assert_close(names["scores"].logp, expected)
    # Two answers with rewards 1 and 0: advantages of opposite sign, equal weight, ratio 1, so that the loss is 0.
    assert abs(names["loss"].item()) < 1e-6
    assert all(p.grad is not None and p.grad.isfinite().all() for p in names["model"].parameters())
    assert names["model"].lm_head.weight.grad.abs().sum() > 0


def test_the_library_example_has_about_twenty_lines_of_code():
    assert len([line for line in fenced("python").splitlines() if line.strip()]) <= 25


def test_the_middle_of_the_example_is_that_of_the_file():
    example = (ROOT / "examples" / "grpo.py").read_text(encoding="utf-8")
    middle = fenced("python", 1)
    assert middle in "\n".join(line.removeprefix(" " * 8) for line in example.splitlines())
    assert [middle.splitlines()[0].split(":")[0], *re.findall(r"\n\n(# \w+)", middle)] == [
        f"# {stage}" for stage in ("Sample", "Judge", "Pack", "Score", "Weigh", "Step")
    ]


def test_the_recipe_is_valid_and_has_ten_lines():
    assert len(fenced("yaml").splitlines()) == 10
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
def test_every_local_link_and_named_module_exists(page):
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []
    modules = re.findall(
        r"(?<![\w/])((?:objective|head|models|data|rewards|rollout|train|distributed)/\w+\.py)\b", text
    )
    assert [module for module in modules if not (ROOT / "src/logitless" / module).exists()] == []
