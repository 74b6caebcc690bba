"""Recipes of the cookbook, unmodified, against the service on a CPU, to their end. `make test-tinker`.

They find tiny data sets and the tokenizer under the names of the hub in the folder that they run in.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("tinker", reason="the Tinker SDK is not installed: make test-tinker")
pytest.importorskip("tinker_cookbook", reason="the cookbook is not installed: make test-tinker")

from tests.tinker.served import served
from tests.tinker.tiny import write_model
from tinker_recipes import DATA, write_data

pytestmark = pytest.mark.tinker

MODEL = "Qwen/Qwen3-8B"  # a name that the cookbook knows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("cookbook")
    write_model(made / MODEL)
    write_data(made, DATA)
    return made


@pytest.fixture(scope="module")
def url(folder):
    with served(MODEL, folder / "saved", cwd=folder) as (_, found):
        yield found


RECIPES = {
    "recipes.sl_loop": ["batch_size=4", "max_length=256", "lora_rank=4"],
    "recipes.rl_loop": ["batch_size=4", "group_size=4", "max_tokens=16", "lora_rank=4", "loss_fn=importance_sampling"],
    "recipes.preference.shorter.train": [
        *("renderer_name=qwen3_disable_thinking", "max_tokens=16", "max_steps=3", "group_size=4", "batch_size=2"),
        *("eval_every=0", "learning_rate=0.001"),
    ],
    "recipes.multiplayer_rl.guess_number.train": [
        *("renderer_name=qwen3_disable_thinking", "max_tokens=8", "max_steps=2", "group_size=2", "batch_size=2"),
        "eval_every=0",
    ],
    "recipes.rl_numerics_check.train": [
        *("renderer_name=qwen3_5_disable_thinking", "group_size=4", "groups_per_batch=2", "max_tokens=32"),
        *("max_trajectory_tokens=3000", "task.num_pages_min=2", "task.num_pages_max=3", "task.page_chars=200"),
        *("max_steps=2", "lora_rank=4"),
    ],
    "recipes.preference.dpo.train": ["renderer_name=role_colon", "batch_size=4", "max_length=256"],
    "recipes.distillation.on_policy_distillation": [
        *(f"teacher_model={MODEL}", "renderer_name=qwen3_disable_thinking", "group_size=2", "groups_per_batch=2"),
        *("max_tokens=8", "lora_rank=4", "max_steps=2"),
    ],
    "recipes.sdft.train": [
        *("renderer_name=qwen3_disable_thinking", "groups_per_batch=3", "max_tokens=8", "topk=5", "eval_every=0"),
        *("lora_rank=4", "max_steps=2", "max_context_length=3000"),
    ],
}


WITHOUT_KL = ("recipes.sl_loop", "recipes.rl_loop", "recipes.preference.dpo.train", "recipes.sdft.train")

ROUNDED = "recipes.multiplayer_rl.guess_number.train"
"""Here tokens follow a sample in its datum: layers that are not row-invariant then round its log-probs otherwise."""


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_to_its_end_and_sampler_and_trainer_agree_in_every_bit(recipe, folder, url, tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", f"tinker_cookbook.{recipe}", f"model_name={MODEL}"]
    environment = {"TINKER_API_KEY": "tml-a", "TINKER_BASE_URL": url, "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [*command, f"log_path={tmp_path / 'log'}", *RECIPES[recipe]],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    kl = [value for row in rows for name, value in row.items() if "kl_sample_train" in name and "time" not in name]
    assert len([row for row in rows if len(row) > 1]) >= 2
    # a few roundings of log-probs below 10
    assert all(abs(value) <= (1e-5 if recipe == ROUNDED else 0.0) for value in kl)
    assert bool(kl) == (recipe not in WITHOUT_KL)
