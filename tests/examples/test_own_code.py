"""The templates for code of one's own run as they are, by the paths and the keys that they show."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from logitless.train.recipe.loading import load_recipe
from tests.train.tiny import completed, tiny_raw

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SHORT = {"blocks": 1, "epochs_per_block": 1, "tokens_per_step": 1000, "tokens_per_micro_batch": 128}


def shown(name: str) -> dict:
    """The keys of a recipe that a template's docstring shows."""
    docstring = re.search(r'^r?"""(.*?)"""', (EXAMPLES / name).read_text(), re.S)[1]
    return yaml.safe_load(docstring.partition("\n\n")[2])


def run_of(folder: Path, name: str, **environment: object) -> list[dict]:
    """The lines of metrics of a short run with a template's keys, the template being copied beside the recipe."""
    shutil.copy(EXAMPLES / name, folder)
    raw = tiny_raw(folder) | {"kl": None, "train": SHORT}
    keys = shown(name)
    raw["rollout"] |= keys.pop("rollout", {})
    raw["rollout"].get("environment", {}).update(environment)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(raw | keys))
    run = completed(load_recipe(folder / "recipe.yaml"))
    return [line for line in run.read_metrics() if "reward/mean" in line]


def test_the_rewards_judge_every_completion(tmp_path):
    rows = [{"id": i, "prompt": "ab", "answer": str(i)} for i in range(8)]
    tiny_raw(tmp_path)
    for name, some in (("train", rows), ("held_out", [{"id": "h", "prompt": "ca", "answer": "7"}])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    [line] = run_of(tmp_path, "own_reward.py")
    assert line["verdict/right_number/graded"] == line["verdict/brevity/graded"] == 16
    assert 0.9 < line["reward/brevity/mean"] <= 1


def test_the_environment_pays_without_a_reward_beside_it(tmp_path):
    letters = {"options": {"tries": 3, "says": "ha"}, "template": "{reply}"}  # those that the tiny tokenizer has
    [line] = run_of(tmp_path, "own_environment.py", **letters)
    assert line["verdict/environment/graded"] == 16
    assert line["reward/environment/mean"] == line["reward/mean"]
    assert line["rollout/turns_max"] <= 3


def test_the_surrogate_and_the_advantage_train(tmp_path):
    [line] = run_of(tmp_path, "own_algorithm.py")
    assert line["optimizer/grad_norm"] > 0
    assert line["advantage/mean"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("page", "name"),
    [("own_reward", "own_reward"), ("environments", "own_environment"), ("extending", "own_algorithm")],
)
def test_what_a_page_shows_of_a_template_stands_in_it(page, name):
    template = (EXAMPLES / f"{name}.py").read_text()
    text = (ROOT / "docs" / f"{page}.md").read_text()
    shown = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if block in template]
    assert shown
    assert f"(../examples/{name}.py)" in text
