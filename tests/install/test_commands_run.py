"""Every quick command of the pages runs, as it stands there, in a folder with what the page speaks of. Minutes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from logitless.cli.main import COMMANDS
from logitless.models.char_tokenizer import character_tokenizer
from tests.test_commands_of_pages import PAGES, commands
from tests.train.tiny import ALPHABET, tiny_raw

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LONG = {
    "doctor recipes/length-toy.yaml": "shown with its output, of a committed run: tests/benchmarks/test_committed.py",
    "serve-engine": "serves until it is stopped; tests/cli/test_serve_engine.py",
    "serve-tinker": "serves until it is stopped; tests/tinker/test_sdk.py",
    "train recipes/smollm2-cpu.yaml": "needs weights out of another package; tests/models/test_gguf.py",
    "train recipes/smollm2-addition.yaml": "needs weights out of another package; tests/models/test_gguf.py",
    "train recipes/qwen2.5-0.5b-gsm8k.yaml": "needs weights and data of the hub; tests/train/plan",
    "train recipe.yaml --set model.layers=row_invariant": "needs a GPU; tests/rollout/test_first_call_gpu.py",
}
"""Commands that begin so are not run here, and where else they are."""

SMALLER = {
    "train recipes/quickstart.yaml": (
        *("--numbered", "--set=train.blocks=12", "--set=warm_start.steps=2", "--set=rollout.zero_signal=keep"),
        *("--set=data.train.size=400", "--set=data.held_out.size=8", "--set=warm_start.data.size=400"),
    ),
    "bench": ("--quick", "--steps=1", "--warmup=0"),
}
"""Added to commands that begin so, to make them quick."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recipe, training code, prompts with responses: what the pages' commands name."""
    raw = tiny_raw(tmp_path)
    tokenizer = character_tokenizer(ALPHABET + "0123456789+=")
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    raw["model"]["source"]["vocab_size"] = len(tokenizer)
    raw["train"]["blocks"] = 60
    raw["checkpoint"] = {"every_blocks": 10, "keep": 9}
    for name in ("recipe.yaml", "RECIPE"):
        (tmp_path / name).write_text(yaml.safe_dump({**raw, "name": "my-first-run", "output": "runs"}))
    for place in ("their/code", "FOLDER"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "train.py").write_text("print('training')\n")
    shutil.copy(ROOT / "examples/own_reward.py", tmp_path)
    asked = {"key": 1, "prompt": "Say 1.", "instruction_id_list": ["count:unique_word_count"], "kwargs": [{"N": 1}]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(asked) + "\n")
    (tmp_path / "responses.jsonl").write_text(json.dumps({"prompt": "Say 1.", "response": "1"}) + "\n")
    return tmp_path


def begins(words: list[str], starts: object) -> str | None:
    """Which of these the command begins with."""
    line = " ".join(words)
    return next((each for each in starts if f"{line} ".startswith(f"{each} ")), None)  # type: ignore[attr-defined]


def test_every_quick_command_of_the_pages_runs_and_ends_well(folder: Path) -> None:
    done: list[list[str]] = []
    failed: list[str] = []
    made_by = ["train recipe.yaml --set train.blocks=50", "train recipes/quickstart.yaml"]
    found = [words for page in PAGES for words in commands(page) if words and words[0] in COMMANDS]
    first = [words for start in made_by for words in found if begins(words, [start])]
    for words in [["recipes", "copy", "quickstart"], *first, *(words for words in found if words not in first)]:
        if words in done or begins(words, LONG) or "..." in words:
            continue
        done.append(words)
        line = [*words, *SMALLER.get(begins(words, SMALLER) or "", ())]
        run = subprocess.run(
            [sys.executable, "-m", "logitless", *line],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "LOGITLESS_SETTINGS": str(folder / "settings")},
            capture_output=True,
            text=True,
        )
        if run.returncode:
            failed.append(f"logitless {' '.join(line)}: {run.returncode}\n{run.stdout}{run.stderr}")
    assert not failed, "\n\n".join(failed)
    assert len(done) > 20


def test_what_is_left_out_is_on_a_page() -> None:
    found = [words for page in PAGES for words in commands(page)]
    assert [start for start in SMALLER if not any(begins(words, [start]) for words in found)] == []


def test_messages_name_extras_so_that_pip_finds_them_in_a_clone_that_is_installed_and_needs_no_index(tmp_path):
    """``pip install 'logitless[rewards]'``: the command in the error of a package that is not installed."""
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "logitless[rewards]"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Requirement already satisfied: logitless[rewards]" in done.stdout
