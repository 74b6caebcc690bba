"""What ``auto`` is as a dtype, where it is resolved, what the first lines say of it, and what a resume makes of it."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from logitless.distributed.arrangement import Arrangement
from logitless.errors import ConfigurationError, LogitlessError, UnavailableError
from logitless.train.assembly.costly import costly_choices
from logitless.train.assembly.resolve import resolved
from logitless.train.plan.run_plan import dry_run
from logitless.train.recipe.loading import dump_recipe, load_recipe, parse_recipe
from logitless.train.recipe.precision import dtype_line
from tests.train.tiny import start, tiny_model, tiny_raw, tiny_recipe

with contextlib.suppress(ImportError):
    import peft  # noqa: F401 - imports bitsandbytes, which fails where torch tells of a GPU that is not there

ROOT = Path(__file__).parents[3]
GPU = torch.device("cuda")
T4 = (7, 5), "Tesla T4"
SERVER = {"rollout__engine": {"name": "vllm_server", "model": "tiny", "urls": ["http://127.0.0.1:1"]}}
LORA = {"model__lora": {"rank": 2, "targets": ["q_proj"]}}
ON_GPU = {"model__device": "auto"}
COVERED = {"model__source__hidden_size": 64, "model__source__intermediate_size": 64}


@pytest.fixture
def gpu(monkeypatch):
    """A machine with one GPU, as torch tells of it; ``gpu((7, 5))`` is an older one."""

    def made(capability=(9, 0), name="NVIDIA H200"):
        told = {"is_available": True, "device_count": 1, "current_device": 0, "get_device_name": name}
        for asked, answer in (told | {"get_device_capability": capability}).items():
            monkeypatch.setattr(torch.cuda, asked, lambda *_, answer=answer: answer)

    return made


def dtypes(recipe):
    return recipe.model.trained_dtype, recipe.model.dtype


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("bfloat16", "bfloat16")),
        ({"kl": None}, ("bfloat16", "float32")),  # nothing is frozen
        (LORA, ("bfloat16", "bfloat16")),
        (LORA | {"model__dtype": "float16"}, ("float32", "float16")),
        (LORA | {"model__dtype": "float32"}, ("float32", "float32")),
        ({"model__autocast": "bfloat16"}, ("float32", "float32")),
        ({"model__trained_dtype": "float32"}, ("float32", "float32")),
        ({"model__dtype": "float32"}, ("bfloat16", "float32")),
    ],
    ids=str,
)
def test_auto_is_bfloat16_on_a_gpu_that_computes_in_it_and_what_is_set_stays(tmp_path, gpu, changes, expected):
    gpu()
    assert dtypes(tiny_recipe(tmp_path, **ON_GPU, **changes)) == expected


@pytest.mark.parametrize("changes", [{}, {"kl": None}, LORA, {"model__trained_dtype": "bfloat16"}], ids=str)
def test_on_a_cpu_auto_is_float32_beside_whatever_the_recipe_sets(tmp_path, gpu, changes):
    trained = changes.get("model__trained_dtype", "float32")
    assert dtypes(tiny_recipe(tmp_path, **ON_GPU, **changes)) == (trained, "float32")
    gpu()
    assert dtypes(tiny_recipe(tmp_path, model__device="cpu", **changes)) == (trained, "float32")


def test_a_gpu_without_bfloat16_trains_in_float32_and_says_so(tmp_path, gpu):
    gpu(*T4)
    recipe = tiny_recipe(tmp_path, **ON_GPU)
    assert dtypes(recipe) == ("float32", "float32")
    assert dtype_line(recipe.model) == "dtype float32: auto, for Tesla T4 does not compute in bfloat16"


def test_the_dtype_is_that_of_the_gpu_that_the_recipe_names(tmp_path, gpu, monkeypatch):
    gpu()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: ((9, 0), (7, 5))[device.index])
    named = [tiny_recipe(tmp_path, model__device=f"cuda:{index}") for index in (0, 1)]
    assert [each.model.trained_dtype for each in named] == ["bfloat16", "float32"]


def test_a_resolved_recipe_has_no_auto_and_keeps_its_dtypes_on_another_machine(tmp_path, gpu, monkeypatch):
    gpu()
    written = dump_recipe(tiny_recipe(tmp_path, **ON_GPU))
    assert yaml.safe_load(written)["model"]["trained_dtype"] == "bfloat16"
    monkeypatch.undo()  # a machine without a GPU
    (tmp_path / "config.yaml").write_text(written)
    assert dtypes(load_recipe(tmp_path / "config.yaml")) == ("bfloat16", "bfloat16")


def test_a_plan_for_gpus_takes_auto_for_gpus_where_there_is_none(tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tiny_raw(tmp_path)))
    read = [load_recipe(tmp_path / "recipe.yaml", ["model.device=auto"], plans_for_gpus=p) for p in (False, True)]
    assert [each.model.trained_dtype for each in read] == ["float32", "bfloat16"]


def test_parts_that_contradict_each_other_do_so_by_the_dtype_that_auto_is(tmp_path, gpu):
    host = {"train__optimizer": {"moments": "host"}}
    with pytest.raises(ConfigurationError, match="trained_dtype: bfloat16"):
        tiny_recipe(tmp_path, **host)
    gpu()
    assert tiny_recipe(tmp_path, **ON_GPU, **host).model.trained_dtype == "bfloat16"


@pytest.mark.parametrize("name", ["trained_dtype", "dtype"])
def test_a_resume_where_auto_is_another_dtype_is_refused_with_the_setting_that_goes_on(tmp_path, name):
    begun = tiny_raw(tmp_path)
    begun["model"] |= {"trained_dtype": "float32", "dtype": "float32"} | {name: "bfloat16"}  # as on a GPU
    begun["train"]["blocks"] = 1
    start(parse_recipe(begun))
    elsewhere = tiny_recipe(tmp_path)
    with pytest.raises(ConfigurationError, match=rf"auto is on this machine.*--set model\.{name}=bfloat16"):
        start(elsewhere, resume=True)


def test_the_first_lines_of_a_run_and_the_dry_run_say_what_was_chosen_and_why(tmp_path, capsys, caplog):
    recipe = tiny_recipe(tmp_path, train__blocks=1)
    with caplog.at_level("INFO", "logitless"):
        start(recipe)
    assert "dtype float32: auto, for a model on the CPU" in capsys.readouterr().out
    assert "rollout engine: transformers, for a model on the CPU" in caplog.messages
    text = dry_run(recipe)
    assert "dtype float32: auto, for a model on the CPU" in text
    assert "layers transformers' own, for a model on the CPU" in text
    assert "engine transformers, for a model on the CPU" in text
    assert "WARNING" not in text


def warnings_of(recipe, device=GPU, arrangement=Arrangement()):  # noqa: B008 - frozen
    return costly_choices(resolved(recipe, tiny_model(recipe, "meta"), arrangement), arrangement, device)


@pytest.fixture
def a_gpu(gpu, monkeypatch):
    """A machine with a GPU on which models are taken to be."""
    pytest.importorskip("triton")
    gpu()
    monkeypatch.setattr("logitless.train.assembly.resolve.device_of", lambda _: GPU)


def test_the_defaults_of_a_gpu_are_not_warned_of(tmp_path, a_gpu):
    assert warnings_of(tiny_recipe(tmp_path, **ON_GPU, **COVERED)) == []


@pytest.mark.parametrize(
    ("changes", "cause", "remedy"),
    [
        ({"model__trained_dtype": "float32"}, "float32 weights", "Leave model.trained_dtype out where"),
        (LORA | {"model__dtype": "float32"}, "float32 weights", "Leave model.dtype out where"),
        ({"model__lora": {"rank": 2, "dropout": 0.1}}, "dropout in an adapter", "Leave model.lora.dropout out."),
        (
            {"model__lora": {"rank": 2, "modules_to_save": ["norm"]}},
            "trained whole beside adapters",
            "Leave model.lora.modules_to_save out.",
        ),
        ({"model__autocast": "bfloat16"}, "model.autocast: bfloat16", "Leave model.autocast out:"),
        ({"model__attention": "sdpa"}, "model.attention: sdpa", "Leave model.attention out."),
        ({"model__layers": "transformers"}, "model.layers: transformers", "Leave model.layers out."),
        ({"model__source__model_type": "gpt_neox"}, "the architecture gpt_neox", "rollout.engine: {name: vllm"),
        ({"rollout__engine": {"name": "transformers"}}, "rollout.engine: transformers", "Leave rollout.engine out."),
        ({"train__optimizer": {"moments": "host"}}, "train.optimizer.moments: host", "holds 18 bytes a weight."),
        ({"train__share_prompts": False}, "train.share_prompts: false", "Leave it out."),
        ({"train__cuda_graphs": False}, "train.cuda_graphs: false", "Leave it out."),
        ({"parallel__deterministic": True}, "parallel.deterministic: true: without CUDA graphs", "Leave it out."),
        (
            {"rollout__engine": {"name": "gpu"}, "model__trained_dtype": "float32"},
            "model.trained_dtype: float32: row-invariant layers are slow in it",
            "Leave model.trained_dtype out.",
        ),
        (
            LORA | {"model__layers": "row_invariant", "model__dtype": "float32"},
            "model.dtype: float32: row-invariant layers are slow in it",
            "Leave model.dtype out.",
        ),
    ],
    ids=str,
)
def test_what_costs_more_than_a_factor_of_two_is_a_warning_with_its_remedy(tmp_path, a_gpu, changes, cause, remedy):
    [warning] = warnings_of(tiny_recipe(tmp_path, **ON_GPU, **COVERED, **changes))
    assert warning.startswith("WARNING: ")
    assert cause in warning
    assert remedy in warning


def test_without_what_triton_compiles_with_a_run_has_other_layers_and_says_what_to_install(
    tmp_path, a_gpu, monkeypatch
):
    missing = "Triton finds no C compiler (apt-get install gcc, or set CC)"
    for module in ("assembly.layers", "recipe.rule"):
        monkeypatch.setattr(f"logitless.train.{module}.without_triton", lambda: missing)
    recipe = tiny_recipe(tmp_path, **ON_GPU, **COVERED)
    chosen = resolved(recipe, tiny_model(recipe, "meta"), Arrangement())
    assert (chosen.recipe.model.layers, chosen.recipe.rollout.engine.name) == ("transformers", "transformers")
    [warning] = warnings_of(recipe)
    assert f"for {missing}: a training step takes about 4 times and sampling about 10 times as long" in warning
    assert warning.endswith("Install what is missing.")
    for changes in ({"model__layers": "row_invariant"}, {"rollout__engine": {"name": "gpu"}}):
        with pytest.raises(LogitlessError, match="no C compiler"):
            warnings_of(tiny_recipe(tmp_path, **ON_GPU, **COVERED, **changes))


def test_a_gpu_older_than_row_invariant_layers_is_the_one_reason_for_others(tmp_path, a_gpu, gpu):
    gpu(*T4)
    old = "compute capability 7.5 is older than 8.0"
    recipe = tiny_recipe(tmp_path, **ON_GPU, **COVERED)
    chosen = resolved(recipe, tiny_model(recipe, "meta"), Arrangement())
    assert chosen.layers_line == f"transformers' own, for {old}"
    assert chosen.recipe.rollout.engine.name == "transformers"
    for changes in ({}, {"rollout__engine": {"name": "transformers"}}, {"model__layers": "transformers"}):
        assert warnings_of(tiny_recipe(tmp_path, **ON_GPU, **COVERED, **changes)) == []  # no setting would help
    for changes in ({"model__layers": "row_invariant"}, {"rollout__engine": {"name": "gpu"}}):
        with pytest.raises(UnavailableError, match=old):
            warnings_of(tiny_recipe(tmp_path, **ON_GPU, **COVERED, **changes))


@pytest.mark.parametrize(
    "changes", [{"model__trained_dtype": "float32"}, {"model__source__model_type": "gpt_neox"}], ids=str
)
def test_sampling_is_warned_of_only_where_the_policy_samples(tmp_path, a_gpu, changes):
    [alone], [served] = (
        warnings_of(tiny_recipe(tmp_path, **ON_GPU, **COVERED, **changes, **engine)) for engine in ({}, SERVER)
    )
    assert "a training step takes about 4 times and sampling about 10 times as long" in alone
    assert "a training step takes about 4 times as long" in served
    assert "vllm_server" not in served


@pytest.mark.parametrize(("key", "value"), [("trained_dtype", "float32"), ("layers", "transformers")])
def test_layers_and_engine_are_both_warned_of_where_the_recipe_sets_both(tmp_path, a_gpu, key, value):
    both = {"rollout__engine": {"name": "transformers"}, f"model__{key}": value}
    layers, engine = warnings_of(tiny_recipe(tmp_path, **ON_GPU, **COVERED, **both))
    assert f"Leave model.{key} out" in layers
    assert engine.endswith("Leave rollout.engine out.")


def test_sharded_weights_cost_what_sampling_with_transformers_takes(tmp_path, a_gpu):
    split = Arrangement(shard=2)
    [warning] = warnings_of(tiny_recipe(tmp_path, **ON_GPU, **COVERED), arrangement=split)
    assert "for weights sharded over 2" in warning
    assert ": sampling takes about 10 times as long" in warning
    copied = tiny_recipe(tmp_path, **ON_GPU, **COVERED, parallel__sampling_shards=1)
    for recipe in (copied, tiny_recipe(tmp_path, **ON_GPU, **COVERED, **SERVER)):
        assert warnings_of(recipe, arrangement=split) == []


def test_four_bits_are_left_out_only_where_there_is_room_for_sixteen(tmp_path, a_gpu):
    changes = {**ON_GPU, **COVERED, **LORA}
    model = tiny_model(tiny_recipe(tmp_path, **changes), "meta")
    four_bits = tiny_recipe(tmp_path, **changes, model__quantize="nf4", model__autocast="bfloat16")
    [warning] = costly_choices(resolved(four_bits, model, Arrangement()), Arrangement(), GPU)
    assert "Leave model.autocast out" in warning
    assert warning.endswith("Leave model.quantize out where the GPU holds the base in 16 bits.")


def test_each_costly_choice_has_its_own_warning_and_those_that_cost_nothing_have_none(tmp_path, a_gpu):
    train = {"train__share_prompts": False, "train__cuda_graphs": False}
    engine = {"rollout__engine": {"name": "transformers"}}
    warnings = warnings_of(tiny_recipe(tmp_path, **ON_GPU, **COVERED, **train, **engine))
    assert [each.split(":")[1].strip() for each in warnings] == [
        "transformers samples, for rollout.engine",
        "train.share_prompts",
        "train.cuda_graphs",
    ]
    single = {"train__share_prompts": False, "rollout__completions_per_prompt": 1}  # no prompt is repeated
    assert warnings_of(tiny_recipe(tmp_path, **ON_GPU, **COVERED, **single)) == []
    adapters = LORA | {"train__optimizer": {"moments": "8bit"}}  # their moments are small
    assert warnings_of(tiny_recipe(tmp_path, **ON_GPU, **COVERED, **adapters)) == []


def test_a_cpu_beside_a_gpu_that_torch_does_not_see_is_a_warning_unless_it_is_meant(tmp_path, monkeypatch):
    monkeypatch.setattr("logitless.train.assembly.costly.unused_gpu", lambda: "torch sees no GPU")
    assert warnings_of(tiny_recipe(tmp_path, model__device="auto"), torch.device("cpu")) == [
        "WARNING: the device is the CPU: torch sees no GPU. With model.device: cpu nothing is said."
    ]
    assert warnings_of(tiny_recipe(tmp_path, model__device="cpu"), torch.device("cpu")) == []


def test_the_dry_run_shows_the_warnings(tmp_path, a_gpu, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda *_: SimpleNamespace(total_memory=80 * 2**30))
    recipe = tiny_recipe(tmp_path, **ON_GPU, **COVERED, train__share_prompts=False)
    [line] = [line for line in dry_run(recipe).splitlines() if "WARNING" in line]
    assert line.strip() == warnings_of(recipe)[0]


def test_the_first_lines_of_a_run_show_the_warnings(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("logitless.train.assembly.stages.costly_choices", lambda *_: ["WARNING: too slow."])
    start(tiny_recipe(tmp_path, train__blocks=1))
    assert "WARNING: too slow." in capsys.readouterr().out.splitlines()


def test_a_cpu_has_nothing_to_be_warned_of(tmp_path):
    assert warnings_of(tiny_recipe(tmp_path, train__share_prompts=False), torch.device("cpu")) == []


def test_the_factors_of_the_warnings_and_the_page_are_those_of_the_committed_results():
    def found(name, **wanted):
        rows = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["rows"]
        [row] = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
        return row

    steps = {
        way: found("step-qwen2.5-0.5b.json", workload="long", contender=way, live=1.0)["seconds"]
        for way in ("logitless", "logitless-autocast")
    }
    rates = {
        engine: found("rollout-H200.json", model="qwen2.5-0.5b", workload="64x8-512-64:512", engine=engine)
        for engine in ("gpu", "transformers")
    }
    page = " ".join((ROOT / "docs" / "performance.md").read_text(encoding="utf-8").split())
    assert f"{1000 * steps['logitless']:.0f} ms instead of {1000 * steps['logitless-autocast']:.0f} (" in page
    assert "ten times as fast" in page
    assert 3.5 < steps["logitless-autocast"] / steps["logitless"] < 4.5  # "about 4 times"
    long = {
        way: found("step-qwen3-1.7b.json", workload="long", contender=way, live=1.0)["seconds"]
        for way in ("logitless", "logitless-8bit-moments", "logitless-host-moments")
    }
    assert [round(long[way] / long["logitless"], 1) for way in long] == [1.0, 2.1, 2.3]
    shared = {
        what: found("common-beginnings-H200.json", model="qwen3-1.7b", shared=what)["seconds"]
        for what in ("nothing", "prompts")
    }
    assert round(shared["nothing"] / shared["prompts"], 1) == 3.6
    rows = {
        graphs: found("short-rows-H200.json", model="smollm2-135m", tokens=511, graphs=graphs)["seconds"]
        for graphs in (False, True)
    }
    assert round(rows[False] / rows[True], 1) == 4.2
    assert 9 < rates["gpu"]["tokens_per_second"] / rates["transformers"]["tokens_per_second"] < 11  # "ten times"
