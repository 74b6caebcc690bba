import hashlib
from pathlib import Path

from logitless.train.record.provenance import digests_of_code
from tests.train.tiny import tiny_recipe


def test_each_file_of_code_that_a_recipe_names_has_a_digest_and_a_module_has_none(tmp_path):
    files = [str(tmp_path / f"{name}.py") for name in ("advantage", "environment", "reward", "surrogate")]
    for file in files:
        Path(file).write_text(f"# {file}")
    advantage, environment, reward, surrogate = (f"{file}:made" for file in files)
    recipe = tiny_recipe(
        tmp_path,
        algorithm__advantage={"name": "own", "factory": advantage},
        algorithm__surrogate={"name": "own", "factory": surrogate},
        rollout__environment={"name": "own", "factory": environment},
        rollout__limits={"max_tokens": 12},
        rewards=[
            {"name": "function", "path": reward},
            {"name": "function", "path": "a.module:reward", "label": "other"},
            {"name": "length", "cap": 4},
        ],
    )
    assert digests_of_code(recipe) == {file: hashlib.sha256(f"# {file}".encode()).hexdigest() for file in files}
