"""Whole runs on a real server, which is killed."""

from pathlib import Path

import pytest
import torch

from logitless.errors import EngineError
from logitless.rollout.vllm.server import VllmServerEngine
from logitless.train.assembly.model import policy_model, tokenizer_of
from logitless.train.store.checkpoint import checkpoints
from tests.train.tiny import completed, start, stored, tiny_raw, tiny_recipe
from tests.vllm.conftest import VLLM
from vllm_process import vllm_server

SHAPE = {"hidden_size": 32, "head_dim": 32}
FLAGS = ("--dtype", "float32", "--max-model-len", "64", "--enforce-eager", "--load-format", "dummy")


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """A server of the tiny recipe's model, with weights that mean nothing."""
    folder = tmp_path_factory.mktemp("server")
    recipe = tiny_recipe(folder, **_model(folder))
    tokenizer = tokenizer_of(recipe.model)
    policy_model(recipe.model, tokenizer, seed=0, device=torch.device("cpu")).save_pretrained(folder / "model")
    tokenizer.save_pretrained(str(folder / "model"))
    with vllm_server(folder / "model", VLLM, folder / "server.log", FLAGS) as process:
        yield process


def _model(folder):
    return {"model__source": tiny_raw(folder)["model"]["source"] | SHAPE}


def _recipe(folder, process, **changes):
    engine = {"name": "vllm_server", "urls": [process.url], "model": "policy", "give_up_seconds": 300.0}
    return tiny_recipe(folder, **_model(folder), rollout__engine=engine | changes.pop("engine", {}), **changes)


def test_a_run_trains_on_a_server_and_the_gate_sees_rounding_alone(tmp_path, process):
    stop = {"mean": 1e-4, "max": 1e-3, "sequence": 1e-3}
    run = completed(_recipe(tmp_path, process, rollout__parity={"stop": stop}))
    lines = list(run.read_metrics())
    blocks = [line for line in lines if "reward/mean" in line]
    assert len(blocks) == 3
    for line in blocks:
        assert 0 < line["parity/difference_mean"] < 1e-5
        assert line["rollout/lag_max"] == 0
    pushes = [line for line in lines if "weights/pushed_bytes" in line]
    assert len(pushes) == 3
    assert all(line["weights/probe_difference_max"] < 1e-4 for line in pushes)


def test_a_server_that_is_killed_and_not_restarted_ends_the_run_with_a_checkpoint_to_go_on_from(
    tmp_path, process, monkeypatch
):
    recipe = _recipe(tmp_path, process, engine={"give_up_seconds": 2.0})
    plain, rounds = VllmServerEngine._sample_all, []

    def killing(self, asked, *arguments):
        rounds.append(len(asked))
        if len(rounds) == 3:  # evaluation, block 1, block 2
            process.kill()
        return plain(self, asked, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(VllmServerEngine, "_sample_all", killing)
        with pytest.raises(EngineError, match=r"ConnectionRefusedError.*--resume"):
            start(recipe)
    folder = Path(recipe.output) / recipe.name
    assert checkpoints(folder / "checkpoints")
    process.start()
    process.wait()
    run = completed(recipe, resume=True)
    lines = list(run.read_metrics())
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert max(line["parity/difference_max"] for line in lines if "parity/difference_max" in line) < 1e-3


def test_a_run_ahead_whose_weights_change_inside_completions_replays_bitwise(tmp_path, process):
    changes = {
        "train__blocks": 6,
        "rollout__staleness": 2,
        "rollout__zero_signal": "refill",
        "rollout__prompts_per_block": 8,
        "rollout__sampling": {"max_new_tokens": 48},
        "rewards": [{"name": "length", "cap": 48}],
        "algorithm": {
            "preset": "grpo",
            "correction": {"level": "token", "max": 2.0},
            "filters": [{"name": "stale", "max_lag": 12}],
        },
        "train__tokens_per_step": 400,
        "train__tokens_per_micro_batch": 64,
    }
    run = completed(_recipe(tmp_path, process, engine={"in_flight": True}, **changes))
    lines = [line for line in run.read_metrics() if "rollout/mixed_fraction" in line]
    assert len(lines) == 6
    assert max(line["rollout/lag_max"] for line in lines) > 0
    engine = {"name": "recorded", "path": str(run.path)}
    changes |= {"rollout__staleness": 0, "rollout__engine": engine}
    again, _ = start(tiny_recipe(tmp_path, name="again", **_model(tmp_path), **changes))
    for one, other in zip(stored(again), stored(run), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items())
