"""Whole runs on servers: what a recipe may ask for, what metrics say, how a run ends and goes on."""

import json
import os
import signal
import threading
from unittest import mock

import pytest
import torch.distributed as dist
from safetensors import SafetensorError

from logitless.distributed import Ranks
from logitless.distributed.failing import SharedWork
from logitless.distributed.sharding import ShardedModel
from logitless.errors import EngineError
from logitless.rollout.engine import Weights
from logitless.rollout.environment import Reply
from logitless.rollout.vllm import weight_folder
from logitless.train.assembly.model import tokenizer_of
from logitless.train.collect.block_log import BlockLog
from logitless.train.collect.one_client import ShardedWeights
from logitless.train.learn.learner import Learner
from logitless.train.record.run_folder import RunFolder
from logitless.train.run import run_recipe
from logitless.train.store.checkpoint import checkpoints
from logitless.types import Prompt
from tests.ranks import run_on_ranks
from tests.rollout.fake_vllm import Served, failing, serving
from tests.train.tiny import (
    assert_same_end,
    completed,
    give_chat_template,
    start,
    start_without_report,
    tiny_model,
    tiny_recipe,
)

URL = "http://127.0.0.1:1"
LORA = {"rank": 2, "alpha": 4.0, "targets": ["q_proj"]}


def _recipe(folder, url=URL, **changes):
    engine = {"name": "vllm_server", "urls": [url], "model": "policy"} | changes.pop("engine", {})
    return tiny_recipe(folder, rollout__engine=engine, **changes)


def _served(folder, seed=9):
    """A server of the recipe's model, started with other weights."""
    recipe = tiny_recipe(folder)
    return Served(lambda: tiny_model(recipe, seed=seed), tokenizer_of(recipe.model), context=64)


def test_a_run_on_a_server_says_what_pushes_took_and_how_far_the_two_are_apart(tmp_path):
    with serving(_served(tmp_path)) as url:
        weights = {"name": "folder", "differences_in_a_row": 4}
        run = completed(_recipe(tmp_path, url, engine={"weights": weights}))
    pushed = [line for line in run.read_metrics() if "weights/pushed_bytes" in line]
    assert len(pushed) == 3  # one after each block
    for line in pushed:
        assert line["weights/probe_difference_max"] < 1e-4
        assert 0 < line["weights/changed_fraction"] <= 1
    for line in run.read_metrics():
        assert line.get("parity/difference_max", 0.0) < 1e-4
        assert line.get("rollout/lag_max", 0) == 0


def test_a_signal_ends_the_wait_for_a_server_that_died_before_the_first_push(tmp_path):
    served = _served(tmp_path)

    def fail(body):
        os.kill(os.getpid(), signal.SIGTERM)
        return failing(503)(body)

    served.faults["/pause"] = [fail] * 1000
    with serving(served) as url, pytest.raises(KeyboardInterrupt) as stopped:
        start(_recipe(tmp_path, url))
    assert stopped.value.args == (signal.SIGTERM,)
    assert not any((tmp_path / "runs").glob("*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on a server, never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    with serving(_served(folder)) as url:
        return completed(_recipe(folder, url))


def test_a_signal_ends_the_wait_of_a_later_push_and_the_resumed_run_ends_as_one_that_never_stopped(tmp_path, whole):
    served = _served(tmp_path)
    pushes = []

    def fail_at_the_third(body):
        pushes.append(body)
        if len(pushes) < 3:
            return 200, json.dumps(served.answer("/pause", body)).encode()
        os.kill(os.getpid(), signal.SIGTERM)
        return failing(503)(body)

    served.faults["/pause"] = [fail_at_the_third] * 1000
    with serving(served) as url:
        recipe = _recipe(tmp_path, url, name="stopped")
        _, complete = start(recipe)
        assert not complete
        assert len(pushes) == 3
        served.faults.clear()
        resumed, complete = start(recipe, resume=True)
        assert complete
    assert_same_end(whole, resumed)


@pytest.mark.parametrize(
    ("evaluation", "block"),
    [(1, 0), pytest.param(2, 2, marks=pytest.mark.slow), (3, 3)],
    ids=["first", "amid the run", "last"],
)
def test_a_signal_ends_an_evaluation_on_a_dead_server_and_the_resumed_run_makes_it_first(
    tmp_path, whole, evaluation, block
):
    served = _served(tmp_path)
    path, begun = "/inference/v1/generate", []

    def fail_in_the_evaluation(body):
        begun.append(body["sampling_params"]["n"] == 1)
        if sum(begun) < evaluation:
            return 200, json.dumps(served.answer(path, body)).encode()
        os.kill(os.getpid(), signal.SIGTERM)
        return failing(503)(body)

    served.faults[path] = [fail_in_the_evaluation] * 10_000
    with serving(served) as url:
        recipe = _recipe(tmp_path, url, engine={"give_up_seconds": 2.0})
        stopped = run_recipe(recipe)
        assert (stopped.ended_by, stopped.exit_status) == ("signal", 143)
        assert checkpoints(stopped.folder.checkpoints)[-1].name.startswith(f"block-{block:06d}")
        served.faults.clear()
        resumed = completed(recipe, resume=True)
    assert_same_end(whole, resumed)
    found = [[line.get("evaluation/reward_mean") for line in run.read_metrics()] for run in (whole, resumed)]
    assert found[0] == found[1]


def _die_from_the_second_block(served):
    """From the second block's second prompt on, nobody answers."""
    rounds: list[int] = []

    def answer(body):
        if body["sampling_params"]["n"] == 4:
            rounds.append(1)
        if len(rounds) > 5:
            return failing(503)(body)
        return 200, json.dumps(served.answer("/inference/v1/generate", body)).encode()

    return answer


def test_an_adapter_alone_trains_on_a_server_that_holds_the_base_model(tmp_path):
    served = _served(tmp_path, seed=tiny_recipe(tmp_path).seed)
    with serving(served) as url:
        run = completed(_recipe(tmp_path, url, engine={"weights": {"name": "adapter"}}, model__lora=LORA))
    assert not _loads(served)
    assert max(line.get("parity/difference_max", 0.0) for line in run.read_metrics()) < 1e-4


def _loads(served):
    return [path for path, _ in served.asked if path == "/collective_rpc"]


def _on_servers(rank, folder, urls, node, changes, device="cpu"):
    """A run of several ranks on servers, whose weights are never whole; what it ended with on this rank."""
    engine = {"name": "vllm_server", "urls": urls, "model": "policy", **changes}
    group_rank = {"GROUP_RANK": str(rank // node)}
    with mock.patch.dict(os.environ, group_rank), mock.patch.object(ShardedModel, "gather", None):
        try:
            recipe = tiny_recipe(folder, rollout__engine=engine, name="several", model__device=device)
            return start_without_report(recipe, ranks=Ranks(data=dist.group.WORLD))[1]
        except EngineError as error:
            return str(error)


def _prompts_asked(served):
    asked = [body for path, body in served.asked if path == "/inference/v1/generate"]
    return {tuple(body["token_ids"]) for body in asked if body["sampling_params"]["n"] == 4}


@pytest.mark.slow
def test_one_rank_of_a_node_asks_the_servers_and_all_train_on_what_one_process_would(tmp_path):
    with serving(_served(tmp_path)) as url:
        alone, _ = start(_recipe(tmp_path, url, name="alone"))
    served = _served(tmp_path)
    with serving(served) as url:
        assert run_on_ranks(2, _on_servers, tmp_path, [url], 2, {}) == [True, True]
    several = RunFolder(tmp_path / "runs" / "several")
    same = ("prompt_id", "completion", "finish_reason", "reward")
    for (_, rows), (_, found) in zip(alone.read_rollouts(), several.read_rollouts(), strict=True):
        assert [[row[name] for name in same] for row in rows] == [[row[name] for name in same] for row in found]
    assert len(_loads(served)) == 4  # one at the start and one after each block: the other rank pushes nothing


@pytest.mark.multi_gpu
def test_sharded_weights_of_gpus_reach_a_server_tensor_by_tensor_and_pass_its_probe(tmp_path):
    with serving(_served(tmp_path)) as url:
        assert run_on_ranks(2, _on_servers, tmp_path, [url], 2, {}, "cuda", device="cuda") == [True, True]


@pytest.mark.slow
def test_each_node_has_a_client_with_servers_and_prompts_of_its_own(tmp_path):
    first, second = _served(tmp_path), _served(tmp_path)
    way = {"name": "folder", "path": str(tmp_path / "weights")}
    with serving(first) as one, serving(second) as other:
        assert run_on_ranks(2, _on_servers, tmp_path, [one, other], 1, {"weights": way}) == [True, True]
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["client-0", "client-1"]
    for each in (first, second):
        assert _prompts_asked(each)
        assert len(_loads(each)) == 4


def test_sharded_weights_that_were_pushed_over_a_network_are_not_read_again_by_one_rank_alone(tmp_path):
    weights = Weights.of(_served(tmp_path).model(), score=lambda *_: [])
    with ShardedWeights(Ranks.alone(), 0, weights, SharedWork()).gathered() as gathered:
        assert [name for name, _ in gathered.tensors()] == [name for name, _ in weights.tensors()]
    with pytest.raises(EngineError, match="a server that was restarted and must get them again"):
        next(gathered.tensors())


def _half_read(rank, values):
    """What a reader gets that gives up a reading and begins another one, then asks for a score."""
    held = Weights(None, lambda: iter(values.items()), None, lambda prompt, completion, _: [len(prompt), *completion])
    sharded = ShardedWeights(Ranks(data=dist.group.WORLD), 1, held, SharedWork())
    if rank != 1:
        sharded.take_part()
        return None
    with sharded.gathered() as gathered:
        first = next(gathered.tensors())[0]
        return first, [name for name, _ in gathered.tensors()], gathered.score((4, 5), (6,), 1.0)


def test_a_reading_of_sharded_weights_may_be_given_up_for_another():
    assert run_on_ranks(2, _half_read, {"a": 1, "b": 2}) == [None, ("a", ["a", "b"], [2, 6])]


@pytest.mark.slow
def test_a_node_without_a_server_has_no_client(tmp_path):
    served = _served(tmp_path)
    with serving(served) as url:
        assert run_on_ranks(2, _on_servers, tmp_path, [url], 1, {}) == [True, True]
    assert len(_loads(served)) == 4


def test_a_server_that_is_gone_ends_all_ranks_with_a_checkpoint(tmp_path):
    served = _served(tmp_path)
    served.faults["/inference/v1/generate"] = [_die_from_the_second_block(served)] * 10_000
    with serving(served) as url:
        ends = run_on_ranks(2, _on_servers, tmp_path, [url], 2, {"give_up_seconds": 0.1})
    assert all("HTTP 503" in end for end in ends)
    assert "(on rank 0)" in ends[1]
    assert checkpoints(RunFolder(tmp_path / "runs" / "several").checkpoints)[-1].name.startswith("block-000001")


# --- weights that change while completions are under way


def test_a_run_whose_weights_change_inside_completions_is_trained_by_their_versions_and_replays_bitwise(
    tmp_path, monkeypatch
):
    served, first_block = _served(tmp_path), tmp_path / "runs" / "tiny" / "collected" / "block-000001.json"
    served.token_seconds = 0.002
    held, step = threading.Event(), Learner.step

    def hold(name):  # a sample of the second block, until the first has been trained on
        if not (name.endswith("-0") and first_block.exists()):
            return False
        held.set()
        return True

    def after_one_is_held(learner):
        assert held.wait(300)
        return step(learner)

    served.hold = hold
    monkeypatch.setattr(Learner, "step", after_one_is_held)
    changes = {
        "train__blocks": 5,
        "rollout__staleness": 2,
        "rollout__sampling": {"max_new_tokens": 24},
        "rollout__zero_signal": "refill",
        "algorithm": {
            "preset": "grpo",
            "correction": {"level": "token", "max": 2.0},
            "filters": [{"name": "stale", "max_lag": 6}],
        },
        "train__tokens_per_step": 400,
        "train__tokens_per_micro_batch": 64,
        "rewards": [{"name": "length", "cap": 24}],
    }
    with serving(served) as url:
        run = completed(_recipe(tmp_path, url, engine={"in_flight": True, "give_up_seconds": 5.0}, **changes))
    lines = [line for line in run.read_metrics() if "rollout/mixed_fraction" in line]
    assert max(line["rollout/mixed_fraction"] for line in lines) > 0
    log = BlockLog(run.collected, [Prompt(str(i), "", ()) for i in range(8)])
    completions = [c for block in range(5) for group in log.read(block)[0].sampled for c in group.completions]
    mixed = [c.token_versions.tolist() for c in completions if c.token_versions is not None]
    assert mixed
    assert all(versions == sorted(versions) for versions in mixed)
    engine = {"name": "recorded", "path": str(run.path)}
    again, _ = start(tiny_recipe(tmp_path, name="again", rollout__engine=engine, **changes | {"rollout__staleness": 0}))
    assert_same_end(run, again)


def test_a_full_disk_under_the_weights_for_servers_is_an_error_of_the_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_folder, "save_file", mock.Mock(side_effect=SafetensorError("No space left on device")))
    weights = {"name": "folder", "path": str(tmp_path / "weights")}
    words = rf"written to {tmp_path}/weights\S*, for the servers to read; given .*No space left on device"
    with serving(_served(tmp_path)) as url, pytest.raises(EngineError, match=words):
        start(_recipe(tmp_path, url, engine={"weights": weights}))


def test_paths_of_a_server_start_at_the_recipes_folder(tmp_path):
    recipe = _recipe(tmp_path, engine={"api_key_file": "./key", "weights": {"name": "folder", "path": "weights"}})
    assert recipe.rollout.engine.api_key_file == str(tmp_path.cwd() / "key")
    assert recipe.rollout.engine.weights.path == str(tmp_path.cwd() / "weights")


class Alone:
    """An environment that notes how many threads call it at a time."""

    inside, most = [], [0]

    def start(self, prompt, *, seed):
        return None

    def reply(self, state, turn):
        self.inside.append(turn)
        threading.Event().wait(0.02)
        self.most[0] = max(self.most[0], len(self.inside))
        self.inside.pop()
        return Reply(reward=float(turn.length % 2))


def test_one_thread_at_a_time_calls_an_environment_though_an_evaluation_runs_beside_sampling(tmp_path):
    give_chat_template(tmp_path)
    changes = {
        "rollout__staleness": 2,
        "rollout__environment": {"name": "own", "factory": f"{__name__}:Alone"},
        "rollout__limits": {"max_turns": 2, "max_tokens": 20},
        "evaluation": {"every_blocks": 1, "samples_per_prompt": 8, "sampling": {"max_new_tokens": 6}},
        "rewards": [],
    }
    with serving(_served(tmp_path)) as url:
        completed(_recipe(tmp_path, url, **changes))
    assert Alone.most == [1]
