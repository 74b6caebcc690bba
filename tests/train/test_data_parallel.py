"""Several ranks that train one policy: they draw, judge and train on what one rank would, each on tokens of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from logitless.cli.main import main
from logitless.distributed import Ranks
from logitless.rollout.environment import SingleTurn
from logitless.rollout.play import play
from logitless.rollout.transformers import TransformersEngine
from logitless.train import checkpoint as checkpoints
from logitless.train import learner as learner_module
from logitless.train.block import pack_groups
from logitless.train.judge import judge
from logitless.train.learner import Learner
from logitless.train.metrics import repeatable
from logitless.train.policy import Policy
from logitless.train.recipe import load_recipe
from logitless.train.run import run_recipe, start
from logitless.train.run_folder import RunFolder
from logitless.train.setup import algorithm_of, data_of, policy_model, rewards_of, tokenizer_of, value_head_of
from tests.ranks import run_on_ranks
from tests.train.tiny import start_without_report, tiny_raw, tiny_recipe

ROOT = Path(__file__).parents[2]
# LayerNorm and learned positions: unlike RMSNorm and rotary embeddings they stay in float64 when the weights are.
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 11,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}


def _run(rank, folder, changes, resume=False, stop_at=None):
    """Train the tiny recipe; with ``stop_at`` the last rank is asked to stop after that step."""
    ranks = Ranks(data=dist.group.WORLD)
    plain = Learner.step

    def step(self):
        record = plain(self)
        if record["step"] == stop_at and ranks.rank == ranks.world - 1:
            signal.raise_signal(signal.SIGINT)
        return record

    Learner.step = step
    try:
        torch.use_deterministic_algorithms(True)
        return start_without_report(tiny_recipe(folder, **changes), ranks=ranks, resume=resume)[1]
    finally:
        Learner.step = plain
        torch.use_deterministic_algorithms(False)


def _on(num_ranks, folder, changes, **options):
    """The folder of a run on so many ranks, all of which say alike whether it is complete."""
    tiny_raw(folder)
    if num_ranks == 1:
        complete = [start(tiny_recipe(folder, **changes), **options)[1]]
    else:
        complete = run_on_ranks(num_ranks, _run, folder, changes, *options.values())
    assert len(set(complete)) == 1
    return RunFolder(folder / "runs" / "tiny"), complete[0]


def _assert_alike(one, several, num_ranks, *, tolerance=1e-5):
    """What was drawn is equal; numbers are, to rounding; several ranks each had tokens."""
    for (_, rows), (_, found) in zip(one.read_rollouts(), several.read_rollouts(), strict=True):
        for row, other in zip(rows, found, strict=True):
            same = ("prompt_id", "completion", "finish_reason", "reward", "verdicts")
            assert [row[name] for name in same] == [other[name] for name in same]
    with_tokens = 0
    for record, other in zip(one.read_metrics(), several.read_metrics(), strict=True):
        tokens = other.pop("parallel/tokens_per_rank", None)
        if "optimizer/tokens" in record:
            assert len(tokens) == num_ranks
            assert sum(tokens) == record["optimizer/tokens"]
            with_tokens += sum(n > 0 for n in tokens) > 1
        other["optimizer/micro_batches"] = record.get("optimizer/micro_batches")
        for name, value in repeatable(record).items():
            # differences of log-probs are nothing but rounding, here of up to a sequence of them
            least = 1e-4 if "difference" in name else 1e-6
            assert other[name] == pytest.approx(value, rel=tolerance, abs=least, nan_ok=True), (record["step"], name)
    assert with_tokens


CASES = {
    "grpo with a KL that is controlled": {},
    "refills, and a block of fewer prompts than ranks": {
        "rollout__zero_signal": "refill",
        "rollout__prompts_per_block": 2,
    },
    "a value head": {"algorithm": {"preset": "ppo"}},
    "rows of one sequence": {"train__tokens_per_micro_batch": 13},
    "one step a block, whose own pass the gate reads": {
        "train__epochs_per_block": 1,
        "train__tokens_per_step": 10_000,
        "rollout__parity": {"stop": {"max": 1e-4, "sequence": 1e-3}},
    },
}


@pytest.mark.parametrize(("case", "num_ranks"), list(zip(CASES, (2, 3, 2, 3, 2), strict=True)))
def test_ranks_draw_and_train_on_what_one_rank_would(case, num_ranks, tmp_path):
    one, _ = _on(1, tmp_path / "one", CASES[case])
    several, complete = _on(num_ranks, tmp_path / "several", CASES[case])
    assert complete
    _assert_alike(one, several, num_ranks)
    assert _files(one) == _files(several)


def test_a_rank_without_a_micro_batch_of_the_step_in_order_knows_the_gates_numbers(tmp_path):
    changes = {
        **CASES["one step a block, whose own pass the gate reads"],
        "train__tokens_per_micro_batch": 10_000,
        "parallel__deterministic": True,
    }
    runs = [_on(number, tmp_path / str(number), changes)[0] for number in (1, 2)]
    one, two = ([record for record in run.read_metrics() if "optimizer/tokens" in record] for run in runs)
    assert {record["parallel/tokens_per_rank"][1] for record in two} == {0}
    assert all("parity/difference_max" in record for record in two)
    assert [r["parity/difference_max"] for r in one] == [r["parity/difference_max"] for r in two]


def _files(run):
    """All but checkpoints and the report, which tests leave out on this process."""
    paths = [path.relative_to(run.path) for path in run.path.rglob("*")]
    return sorted(path for path in paths if path.parts[0] not in ("checkpoints", "report.html"))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """A run of two ranks that nothing stopped."""
    folder, complete = _on(2, tmp_path_factory.mktemp("whole"), {})
    assert complete
    return folder


def _assert_same_bits(one, other):
    ends = [checkpoints.load_checkpoint(folder.checkpoints) for folder in (one, other)]
    weights = [load_file(folder.model / "model.safetensors") for folder in (one, other)]
    for found, wanted in (weights, [end.tensors for end in ends]):
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, wanted[name]), name
    assert [repeatable(r) for r in one.read_metrics()] == [repeatable(r) for r in other.read_metrics()]
    assert list(one.read_rollouts()) == list(other.read_rollouts())


def test_the_same_run_twice_on_two_ranks_is_the_same_run(two_ranks, tmp_path):
    _assert_same_bits(two_ranks, _on(2, tmp_path, {})[0])


@pytest.mark.parametrize("step", [2, 4])  # in an epoch, at a block's end
def test_ctrl_c_heard_by_one_rank_stops_all_and_resume_continues_bitwise(two_ranks, tmp_path, step):
    folder, complete = _on(2, tmp_path, {}, resume=False, stop_at=step)
    assert not complete
    assert folder.read_metrics()[-1]["step"] == step
    _, complete = _on(2, tmp_path, {}, resume=True)
    assert complete
    _assert_same_bits(two_ranks, folder)


def _status(rank, folder):
    """The exit status of a run whose last rank is told to end after the first step."""
    ranks, plain = Ranks(data=dist.group.WORLD), Learner.step

    def step(self):
        if ranks.rank == ranks.world - 1 and self.progress.step == 1:
            signal.raise_signal(signal.SIGTERM)
        return plain(self)

    with mock.patch.object(Learner, "step", step), mock.patch("logitless.train.run.write_report"):
        return run_recipe(tiny_recipe(folder), ranks=ranks).exit_status


def test_a_signal_to_one_rank_is_the_exit_status_of_all(tmp_path):
    tiny_raw(tmp_path)
    assert run_on_ranks(2, _status, tmp_path) == [143, 143]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_ranks(two_ranks, tmp_path, before, after):
    folder, _ = _on(before, tmp_path, {"train__blocks": 2})
    _on(after, tmp_path, {}, resume=True)
    for record, other in zip(two_ranks.read_metrics(), folder.read_metrics(), strict=True):
        if "optimizer/grad_norm" in record:
            assert other["optimizer/grad_norm"] == pytest.approx(record["optimizer/grad_norm"], rel=1e-5)
            assert ("parallel/tokens_per_rank" in other) == ((before if record["block"] <= 2 else after) == 2)


def _exported(run, tmp_path):
    """Weights of the folder that an export makes, and those of the last checkpoint, both by name."""
    assert main(["export", str(run.path), "--to", str(tmp_path / "exported"), "--dtype", "float32"]) == 0
    assert [path.name for path in (tmp_path / "exported").glob("*.safetensors")] == ["model.safetensors"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    tensors = checkpoints.load_checkpoint(run.checkpoints).tensors
    trained = {name.partition("/")[2]: t for name, t in tensors.items() if name.startswith("parameter/")}
    return dict(loaded.named_parameters()), trained


def test_a_run_of_several_ranks_is_exported_to_one_folder_with_the_bits_of_its_shards(two_ranks, tmp_path):
    loaded, trained = _exported(two_ranks, tmp_path)
    assert loaded.keys() == trained.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in trained.items())


def test_adapters_of_several_ranks_are_merged_into_one_folder(tmp_path):
    changes = {"model__lora": {"rank": 2, "alpha": 4.0, "targets": ["q_proj"]}, "train__blocks": 1, "kl": None}
    run, _ = _on(2, tmp_path, changes)
    loaded, trained = _exported(run, tmp_path)
    (a,), (b,) = ([t for name, t in trained.items() if f"lora_{each}" in name] for each in "AB")
    recipe = tiny_recipe(tmp_path, **changes)
    base = policy_model(recipe.model, tokenizer_of(recipe.model), seed=recipe.seed, device=torch.device("cpu"))
    weight = dict(base.named_parameters())["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"]
    merged = weight.detach() + 4.0 / 2 * b @ a
    assert b.any()
    torch.testing.assert_close(loaded["model.layers.0.self_attn.q_proj.weight"].detach(), merged, rtol=1e-6, atol=1e-6)


FLOAT64 = {
    "a KL in the loss": {},
    "a value head": {"algorithm": {"preset": "ppo"}},
    "many rows, some ranks with more of them": {"train__tokens_per_micro_batch": 13},
    "a whole block a step": {"train__tokens_per_step": 1000, "kl": None},
}


def _learner(folder, changes, ranks):
    """A learner of the tiny recipe in float64, and what its engine would draw from."""
    recipe = tiny_recipe(folder, model__source=GPT2, **changes)
    tokenizer = tokenizer_of(recipe.model)
    algorithm = algorithm_of(recipe)
    models = [policy_model(recipe.model, tokenizer, seed=seed, device=torch.device("cpu")).double() for seed in (0, 1)]
    value_head = value_head_of(recipe, algorithm, models[0])
    policy = Policy(models[0], value_head=None if value_head is None else value_head.double())
    reference = None if recipe.kl is None else Policy(models[1])
    return Learner(recipe, algorithm, policy, reference, reward_weights={"length": 1.0}, ranks=ranks), tokenizer


def _advantaged(folder, changes):
    """A block as one rank prepares it."""
    learner, tokenizer = _learner(folder, changes, Ranks.alone())
    recipe = learner.recipe
    data, engine = data_of(recipe, tokenizer), TransformersEngine(learner.policy.model, tokenizer)
    prompts = list(data.train[:5])
    episodes = play(engine, prompts, SingleTurn(), num_samples=4, options=recipe.rollout.sampling, seed=7)
    groups = judge(prompts, episodes, rewards_of(recipe, prompts), unscored=recipe.rollout.unscored)
    return learner.with_advantages(learner.score(pack_groups(groups), groups), groups)


def _gradients(rank, folder, changes, block):
    """The gradient of each parameter in each step of an epoch whose weights do not move."""
    learner, _ = _learner(folder, changes, Ranks(data=dist.group.WORLD) if dist.is_initialized() else Ranks.alone())
    found = []

    def instead_of_a_step(optimizer, *, meanwhile, **_):
        meanwhile()
        found.append({name: p.grad.clone() for name, p in learner.policy.named_parameters().items()})
        optimizer.zero_grad(set_to_none=True)
        return torch.tensor(0.0), True

    plain, learner_module.take_step = learner_module.take_step, instead_of_a_step
    try:
        learner.begin(block)
        while learner.in_training and learner.progress.epoch == 0:
            learner.step()
    finally:
        learner_module.take_step = plain
    return found, learner.tokens_per_rank


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("case", FLOAT64)
def test_in_float64_the_gradients_of_a_block_are_those_of_one_rank(case, num_ranks, tmp_path):
    changes = FLOAT64[case]
    tiny_raw(tmp_path)
    block = _advantaged(tmp_path, changes)
    wanted, _ = _gradients(0, tmp_path, changes, block)
    for found, tokens in run_on_ranks(num_ranks, _gradients, tmp_path, changes, block):
        assert len(tokens) == num_ranks
        assert len(found) == len(wanted)
        for step, of_one in zip(found, wanted, strict=True):
            for name, gradient in of_one.items():
                assert gradient.dtype == torch.float64
                assert gradient.any() or "value_head" in name
                torch.testing.assert_close(step[name], gradient, rtol=1e-12, atol=1e-12)


SHORT = [
    "warm_start.steps=10",
    "warm_start.sequences_per_step=32",
    "warm_start.data.size=400",
    "data.train.size=200",
    "data.held_out.size=24",
    "rollout.prompts_per_block=8",
    "rollout.completions_per_prompt=8",
    "rewards.0.partial_credit=true",
    "train.blocks=3",
    "train.tokens_per_step=300",
    "train.tokens_per_micro_batch=200",
    "evaluation.every_blocks=3",
    "checkpoint.every_blocks=3",
]


def _quickstart_alike(tmp_path, num_ranks, device, tolerance):
    """The quickstart under torchrun and in this process: what is drawn is equal, numbers are to a tolerance."""
    settings = [*SHORT, f"output={tmp_path}", f"model.device={device}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    torchrun += ["--nproc-per-node", str(num_ranks), "-m", "logitless"]
    for_both = [argument for each in settings for argument in ("--set", each)]
    child = subprocess.run(
        [*torchrun, "train", "recipes/quickstart.yaml", "--set", "name=several", *for_both],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.count("finished: ") == 1  # the first rank speaks, the others are silent
    several = RunFolder(tmp_path / "several")
    assert child.stdout.count("block 3/3") == len([r for r in several.read_metrics() if r["block"] == 3])
    one, _ = start(load_recipe(ROOT / "recipes/quickstart.yaml", [*settings, "name=one"]))
    _assert_alike(one, several, num_ranks, tolerance=tolerance)


def test_the_quickstart_on_four_ranks_under_torchrun_is_the_quickstart(tmp_path):
    _quickstart_alike(tmp_path, 4, "cpu", 1e-5)


@pytest.mark.multi_gpu
def test_the_quickstart_on_two_gpus_is_the_quickstart_of_one(tmp_path):
    _quickstart_alike(tmp_path, 2, "cuda", 1e-4)
