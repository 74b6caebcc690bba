"""What is forecast of the host's memory is what real tensors take there."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from logitless.distributed.arrangement import Arrangement
from logitless.distributed.sharding import local_part
from logitless.models.activations import set_modes
from logitless.models.lm_head import backbone_hidden
from logitless.train.assembly.algorithm import algorithm_of
from logitless.train.assembly.policies import policies_of
from logitless.train.learn.policy import Policy
from logitless.train.optim.locked_memory import locked_bytes
from logitless.train.optim.master_weights import MasterAdamW, master_weight
from logitless.train.plan.host_memory import ROWS, host_memory, page_locked
from logitless.train.plan.scaling import forecast
from logitless.train.plan.training_memory import TrainingMemory, layer_bytes
from logitless.train.recipe.config import Recipe
from logitless.types import PackedInputs
from tests.ranks import run_on_ranks
from tests.train.fake_driver import FakeDriver
from tests.train.tiny import tiny_model, tiny_raw, tiny_recipe

SIZES = {
    f"model__source__{name}": size
    for name, size in {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
    }.items()
}
"""Few of the weights' sizes are powers of two."""

ALONE = Arrangement()
BFLOAT16 = {"model__trained_dtype": "bfloat16"}


def on_a_gpu(folder: Path, **changes: object) -> Recipe:
    return tiny_recipe(folder, model__device="auto", **(SIZES | changes))


def forecast_of(recipe: Recipe, arrangement: Arrangement = ALONE, processes: int = 1) -> TrainingMemory:
    return host_memory(recipe, tiny_model(recipe, "meta"), arrangement, processes=processes)


def storages(*modules: nn.Module) -> int:
    """Bytes of all weights that modules hold, with their masters, each counted once."""
    weights = [weight for module in modules for weight in module.parameters()]
    held = [weight for p in weights for weight in {id(p): p, id(master_weight(p)): master_weight(p)}.values()]
    return sum({s.data_ptr(): s.nbytes() for s in (weight.untyped_storage() for weight in held)}.values())


def test_masters_and_moments_are_forecast_as_they_lock_pages(tmp_path, monkeypatch):
    driver = FakeDriver().install(monkeypatch)
    recipe = on_a_gpu(tmp_path, **BFLOAT16, train__optimizer={"moments": "host"})
    model = tiny_model(recipe)
    optimizer = MasterAdamW([{"params": list(model.parameters())}], on_host=True, lr=1e-3)
    for master in optimizer.lowered:
        optimizer._state_of(master)
    parts = forecast_of(recipe).moments["training"]
    assert parts["master weights and optimizer state, page-locked"] == sum(driver.locked.values())
    assert parts["a tensor on its way to a checkpoint"] == max(master.nbytes for master in optimizer.lowered)


def test_page_locked_1_7b_takes_its_numbers_alone_where_pytorch_takes_a_third_more():
    """Hand numbers of Qwen3-1.7B: D 2048, F 6144, 28 layers, 151,936 words, 16 and 8 heads of 128."""
    layer = [2048 * 2048, 1024 * 2048, 1024 * 2048, 2048 * 2048, *[6144 * 2048] * 3, 2048, 2048, 128, 128]
    weights = [151_936 * 2048, *28 * layer, 2048]
    assert round(3 * 4 * sum(weights) / 1e9, 2) == 20.65
    assert round(3 * sum(locked_bytes(4 * n) for n in weights) / 1e9, 2) == 20.65
    assert round(3 * sum(page_locked(4 * n) for n in weights) / 1e9, 1) == 27.6


@pytest.mark.parametrize("changes", [{}, BFLOAT16, {"model__dtype": "bfloat16"}, {"kl": None}], ids=str)
def test_a_model_that_is_cut_from_the_host_is_there_once_with_masters_and_reference(changes, tmp_path):
    recipe, arrangement = on_a_gpu(tmp_path, **changes), Arrangement(1, 2, 1)
    model = tiny_model(recipe)
    policy, reference, _ = policies_of(recipe, algorithm_of(recipe), model)
    held = storages(policy.model, *([reference.model] if isinstance(reference, Policy) else []))
    read = forecast_of(recipe, arrangement, processes=2).moments["reading the model"]["the model"]
    if recipe.model.dtype == "bfloat16":  # while it is copied it is not yet rounded
        held = 2 * storages(policy.model)
    assert read == held


@pytest.mark.parametrize("lora", [{}, {"model__lora": {"rank": 2}, "model__dtype": "bfloat16"}], ids=["full", "lora"])
def test_a_model_that_goes_to_the_gpu_as_a_whole_is_read_by_each_process(lora, tmp_path):
    recipe = on_a_gpu(tmp_path, kl=None, **lora)
    read = storages(tiny_model(on_a_gpu(tmp_path, kl=None))) // (
        2 if lora else 1
    )  # in float32, a frozen base in bfloat16
    for processes in (1, 2):
        parts = forecast_of(recipe, Arrangement(replicate=processes), processes).moments["reading the model"]
        assert parts["the model"] == processes * read


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="asks Linux")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_base_that_is_read_in_the_dtype_of_its_files_is_those_files_and_takes_nothing(dtype, tmp_path):
    plain = tiny_model(on_a_gpu(tmp_path, kl=None)).bfloat16()
    plain.save_pretrained(tmp_path / "model")
    source = {"model__source": str(tmp_path / "model"), "model__random_weights": False, "model__lora": {"rank": 2}}
    recipe = tiny_recipe(tmp_path, model__device="auto", model__dtype=dtype, kl=None, **source)
    base = {n: p for n, p in tiny_model(recipe).named_parameters() if not p.requires_grad}
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    files = [tuple(int(at, 16) for at in line[0].split("-")) for line in maps if line[-1].endswith(".safetensors")]
    mapped = [any(start <= p.data_ptr() < end for start, end in files) for p in base.values()]
    assert mapped == [dtype == "bfloat16"] * len(base)
    taken = sum(p.nbytes for p, is_file in zip(base.values(), mapped, strict=True) if not is_file)
    assert forecast_of(recipe).moments["reading the model"]["the model"] == taken


class _Copied(TorchDispatchMode):
    """Bytes that are copied without waiting for them, as to the host."""

    def __init__(self):
        super().__init__()
        self.sizes = list[int]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default and args[2:] == (True,):
            self.sizes.append(args[0].untyped_storage().nbytes())
        return function(*args, **(kwargs or {}))


def test_inputs_of_layers_are_forecast_for_every_layer_that_no_budget_is_left_for(tmp_path):
    tokens = 20
    recipe = on_a_gpu(tmp_path, train__tokens_per_micro_batch=tokens, train__activation_memory=1)
    model = tiny_model(recipe)
    set_modes(model, ["host"] * 3)
    places = torch.arange(tokens)
    with _Copied() as copied:
        backbone_hidden(model, PackedInputs(torch.zeros_like(places), places, (tokens,), places, (tokens,)))
    parts = forecast_of(recipe).moments["training"]
    assert len(copied.sizes) == 3
    assert parts["inputs of layers, page-locked (estimate)"] == ROWS * sum(map(page_locked, copied.sizes))


def test_layers_stay_on_the_gpu_where_the_budget_is_enough(tmp_path):
    name = "inputs of layers, page-locked (estimate)"
    assert name not in forecast_of(on_a_gpu(tmp_path)).moments["training"]
    assert name not in forecast_of(on_a_gpu(tmp_path, train__activation_memory=1 << 30)).moments["training"]
    one, again = 24 * 4 * 32, sum(layer_bytes(tiny_model(on_a_gpu(tmp_path), "meta"), 4)) * 32
    parts = forecast_of(on_a_gpu(tmp_path, train__activation_memory=again + one)).moments["training"]
    assert parts[name] == ROWS * 2 * page_locked(one)  # one of three layers is left


def _held_by_a_rank(rank, folder, changes):
    recipe = on_a_gpu(folder, **changes)
    model = tiny_model(recipe)
    policy, reference, _ = policies_of(recipe, algorithm_of(recipe), model)
    mesh = Arrangement(1, dist.get_world_size(), 1).mesh("cpu")
    policy.shard(mesh)
    reference.shard(mesh, on_host=True)
    state = policy.whole_state()
    written = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state.values()}
    shards = [local_part(p).untyped_storage().nbytes() for p in reference.sharded.parameters.values()]
    largest = max(local_part(p).nbytes for p in policy.named_parameters().values())
    return shards, largest, sum(written.values())


@pytest.mark.parametrize("changes", [{}, BFLOAT16 | {"model__dtype": "bfloat16"}], ids=str)
def test_shards_of_a_reference_and_the_model_that_is_written_are_those_of_real_processes(changes, tmp_path):
    tiny_raw(tmp_path)
    changes = changes | {"parallel__reference": "host"}
    found = forecast_of(on_a_gpu(tmp_path, **changes), Arrangement(1, 2, 1), processes=2).moments
    ranks = run_on_ranks(2, _held_by_a_rank, tmp_path, changes)
    locked = sum(page_locked(size) for shards, _, _ in ranks for size in shards)
    for moment in ("training", "writing the model"):  # the second process may have a row less of a shard
        assert locked <= found[moment]["reference, page-locked"] <= 1.1 * locked
    assert found["training"]["a tensor on its way to a checkpoint"] == 2 * ranks[0][1]
    whole = ranks[0][2]  # rows that fill up the last shard included
    assert found["writing the model"]["the model"] <= whole <= 1.1 * found["writing the model"]["the model"]


def test_what_processes_of_one_machine_hold_adds_up_and_on_a_cpu_is_all_that_they_hold(tmp_path):
    recipe, arrangement = on_a_gpu(tmp_path, kl=None), Arrangement(replicate=16)
    model = tiny_model(recipe, "meta")
    read = [
        forecast(recipe, model, arrangement, processes=n).host.moments["reading the model"]["the model"]
        for n in (1, 8, None)
    ]
    assert read == [read[0], 8 * read[0], 16 * read[0]]
    on_cpu = forecast(tiny_recipe(tmp_path, **SIZES, kl=None), model, arrangement, processes=4)
    assert on_cpu.host.peak_bytes == 4 * on_cpu.memory.peak_bytes


def test_weights_that_wait_on_the_host_for_score_centering_are_locked_once_a_version_and_process(tmp_path):
    algorithm = {"surrogate": {"name": "reinforce"}, "score_centering": "host"}
    recipe = on_a_gpu(tmp_path, kl=None, algorithm=algorithm, rollout__staleness=2)
    weights = sum(p.nbytes for p in tiny_model(recipe, "meta").parameters())
    found = forecast_of(recipe, processes=2).moments
    for moment in ("training", "writing the model"):
        assert 2 * 3 * weights <= found[moment]["weights that sampled"] < 2 * 2 * 3 * weights  # whole powers of two
