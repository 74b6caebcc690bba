"""``logitless recipes``: what comes with the package can be seen, copied and then run from where it was copied to."""

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
