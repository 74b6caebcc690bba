"""The plan by hand, without weights and without a run folder."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from logitless.distributed.arrangement import Arrangement
from logitless.errors import ConfigurationError, DataError, LogitlessError, UnavailableError
from logitless.train.assembly.checks import positions
from logitless.train.assembly.model import policy_model, tokenizer_of
from logitless.train.plan.run_plan import dry_run, plan_of
from logitless.train.plan.training_memory import layer_bytes, training_memory
from logitless.train.run import start
from tests.train.tiny import tiny_recipe

# The tiny Llama: an embedding and a head of 11 x 16, four projections of 16 x 16, three of 16 x 32, three norms of 16
NUM_WEIGHTS = 2 * 11 * 16 + 4 * 16 * 16 + 3 * 16 * 32 + 3 * 16


def test_steps_follow_from_tokens(tmp_path):
    plan = plan_of(tiny_recipe(tmp_path))
    assert plan.completions_per_block == 16
    assert plan.tokens_per_block == 96
    assert plan.steps_per_block == 4  # 96 tokens in steps of 40: 2, in each of 2 epochs
    assert plan.steps == 12
    assert plan.first_prompt.text == "ah"
    assert plan.counts["train"]["rows"] == 8


def test_a_step_is_at_least_a_group(tmp_path):
    assert plan_of(tiny_recipe(tmp_path, train__tokens_per_step=1)).steps_per_block == 2 * 4


def test_full_fine_tuning_holds_weights_gradients_moments_and_a_reference(tmp_path):
    parts = plan_of(tiny_recipe(tmp_path)).memory_bytes
    assert parts["trained weights"] == parts["gradients"] == parts["reference"] == 4 * NUM_WEIGHTS
    assert parts["AdamW moments"] == 8 * NUM_WEIGHTS
    assert parts["frozen weights"] == 0


def test_without_a_kl_there_is_no_reference_and_a_bfloat16_one_is_half_as_large(tmp_path):
    assert "reference" not in plan_of(tiny_recipe(tmp_path, kl=None)).memory_bytes
    assert plan_of(tiny_recipe(tmp_path, model__dtype="bfloat16")).memory_bytes["reference"] == 2 * NUM_WEIGHTS


def test_lora_trains_its_factors_only_and_needs_no_second_copy(tmp_path):
    recipe = tiny_recipe(tmp_path, model__dtype="bfloat16", model__lora={"rank": 2, "targets": ["q_proj"]})
    parts = plan_of(recipe).memory_bytes
    assert parts["frozen weights"] == 2 * NUM_WEIGHTS
    assert parts["trained weights"] == 4 * 2 * (16 + 16)
    assert "reference" not in parts


def test_a_value_head_is_counted_with_its_gradient_and_moments_and_has_no_reference(tmp_path):
    parts = plan_of(tiny_recipe(tmp_path, algorithm={"preset": "ppo"})).memory_bytes
    assert parts["value head"] == 4 * 4 * (16 + 1)
    assert parts["trained weights"] == parts["reference"] == 4 * NUM_WEIGHTS
    assert "value head" not in plan_of(tiny_recipe(tmp_path)).memory_bytes


def test_checkpointing_saves_activations(tmp_path):
    def activations(**changes):
        recipe = tiny_recipe(
            tmp_path, train__tokens_per_micro_batch=100_000, model__source__num_hidden_layers=16, **changes
        )
        return plan_of(recipe).memory_bytes["activations or cache (estimate)"]

    assert activations(model__gradient_checkpointing=True) < activations() / 4


@pytest.mark.parametrize("recomputes", [True, False])
def test_the_plan_of_one_process_and_the_forecast_of_several_count_a_layer_alike(recomputes, tmp_path):
    tokens = 100_000
    recipe = tiny_recipe(tmp_path, train__tokens_per_micro_batch=tokens, model__gradient_checkpointing=recomputes)
    model = policy_model(recipe.model, tokenizer_of(recipe.model), seed=0, device=torch.device("meta"))
    moments = training_memory(model, Arrangement(), tokens=tokens).moments
    row = 2 * 16 * 4 * tokens  # last hidden states and their gradient, which the plan counts to the head
    of_all, broadcast_object = (
        moments[at]["inputs of layers"] + moments[at]["recomputed in a layer"] for at in ("layers", "end")
    )
    assert plan_of(recipe).memory_bytes["activations or cache (estimate)"] == of_all - row
    assert broadcast_object - row == tokens * sum(layer_bytes(model, 4))


def test_sampling_holds_the_cache_and_one_layer_of_the_prompts_read_together(tmp_path):
    def sampling(**changes):
        recipe = tiny_recipe(tmp_path, data__max_prompt_tokens=100, train__tokens_per_micro_batch=110, **changes)
        return plan_of(recipe).memory_bytes["activations or cache (estimate)"]

    layers, kv_width, width, longest = 1, 16, 16, 100
    cache = 4 * 16 * (longest + 6) * layers * 2 * kv_width  # 4 bytes, 16 completions of 4 prompts
    assert sampling() == cache + 4 * 17 * width * 4 * longest
    assert sampling(rollout__prefill_tokens=250) == cache + 4 * 17 * width * 250
    assert sampling(rollout__prefill_tokens=50) == cache + 4 * 17 * width * longest  # a long prompt is read alone


def test_blocks_collected_ahead_in_this_process_take_a_copy_of_the_model_and_the_weights_it_is_handed_next(tmp_path):
    lora = {"rank": 2, "targets": ["q_proj"]}
    ahead = plan_of(tiny_recipe(tmp_path, rollout__staleness=1, model__lora=lora)).memory_bytes
    on_policy = plan_of(tiny_recipe(tmp_path, model__lora=lora)).memory_bytes
    assert ahead["copy to sample with"] == 2 * ahead["trained weights"] + 4 * NUM_WEIGHTS
    assert ahead["trained weights"] == 4 * 2 * (16 + 16)
    assert "copy to sample with" not in on_policy
    [at_once] = (name for name in on_policy if name.startswith("activations"))
    assert ahead[at_once] > on_policy[at_once]  # sampling and training at the same time


def test_eight_billion_weights_are_planned_without_being_made(tmp_path):
    source = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    changes = {f"model__source__{key}": value for key, value in source.items()}
    plan = plan_of(tiny_recipe(tmp_path, kl=None, **changes))
    assert plan.memory_bytes["trained weights"] == 4 * 8_030_261_248  # Llama 3.1 8B


def test_the_text_names_each_part_and_writes_nothing(tmp_path):
    text = dry_run(tiny_recipe(tmp_path))
    for part in (
        "tiny: checked",
        "4 prompts x 4 completions = 16",
        "at most 96 scored tokens",
        "AdamW moments",
        "total",
    ):
        assert part in text
    assert not (tmp_path / "runs").exists()


def test_the_text_says_what_a_gpu_needs_of_its_host_and_whether_this_one_has_it(tmp_path, monkeypatch):
    changes = {
        "model__device": "auto",
        "model__trained_dtype": "bfloat16",
        "train__optimizer": {"moments": "host"},
    }
    text = dry_run(tiny_recipe(tmp_path, **changes))
    assert "memory of the host beside a GPU, most while writing the model" in text
    assert "master weights and optimizer state, page-locked" in text
    assert "available here" not in text
    monkeypatch.setattr("logitless.train.plan.run_plan.free_host_memory", lambda: 1000)
    assert "more than is available here: 1.0 KiB" in dry_run(tiny_recipe(tmp_path, **changes))
    assert "host" not in dry_run(tiny_recipe(tmp_path))
    if not torch.cuda.is_available():
        assert "host" not in dry_run(tiny_recipe(tmp_path, model__device="auto"))


def test_the_text_names_what_replaces_parts_of_the_preset(tmp_path):
    own = {"name": "own", "factory": "logitless.objective.surrogate:Clip"}
    text = dry_run(tiny_recipe(tmp_path, algorithm={"surrogate": own, "advantage": {"name": "leave_one_out"}}))
    assert "surrogate          logitless.objective.surrogate:Clip" in text
    assert "advantage          leave_one_out" in text
    assert "weighting" not in text


def test_a_dry_run_looks_at_no_run_folder(tmp_path):
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    dry_run(tiny_recipe(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {"data__train__path": "nowhere.jsonl"},
        {"model__tokenizer": "./nowhere"},
        {"rewards": [{"name": "exact", "column": "absent"}]},
        {"algorithm": {"preset": "ppo"}, "value_head": {"source": "nowhere.safetensors"}},
        {"model__source__vocab_size": 5},
        {"rollout__engine": {"name": "recorded", "path": "nowhere.jsonl"}},
        {"writers": ["wandb"]},
        {"model__source__max_position_embeddings": 6},
        {"model__source__hidden_size": 0},
        {"model__source__hidden_size": "wide"},
        {"model__source__intermediate_size": 0},
        {"model__source__num_attention_heads": 0},
        {"model__source__hidden_act": "nonsense"},
        {"model__device": "banana"},
        {"model__device": "cuda:77"},
    ],
)
def test_a_dry_run_finds_what_a_start_would_find(tmp_path, changes):
    with pytest.raises(LogitlessError):
        dry_run(tiny_recipe(tmp_path, **changes))


def _recorded(tmp_path, **changes):
    rows = [
        {"prompt_id": str(prompt), "token_ids": [3, 4], "text": "ab", "finish_reason": "stop"} | changes
        for prompt in range(8)
        for _ in range(4)
    ]
    path = tmp_path / "recorded.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"rollout__engine": {"name": "recorded", "path": str(path)}}


@pytest.mark.parametrize("token", [11, -1])
def test_a_recorded_token_that_the_model_does_not_have_is_found(tmp_path, token):
    dry_run(tiny_recipe(tmp_path, **_recorded(tmp_path)))
    with pytest.raises(DataError, match=f"given {token} in a completion of prompt '0'"):
        dry_run(tiny_recipe(tmp_path, **_recorded(tmp_path, token_ids=[3, token])))


def test_a_prompt_with_too_few_recorded_completions_is_found(tmp_path):
    with pytest.raises(DataError, match="given 4 of prompt '0'"):
        dry_run(tiny_recipe(tmp_path, **_recorded(tmp_path), rollout__completions_per_prompt=5))


def test_the_longest_sequence_may_fill_the_models_positions_exactly(tmp_path):
    # prompts of 2 tokens and 6 new ones, of which the last is drawn and not read
    dry_run(tiny_recipe(tmp_path, model__source__max_position_embeddings=7))
    with pytest.raises(ConfigurationError, match="max_new_tokens=6, of which 5 fit"):
        dry_run(tiny_recipe(tmp_path, model__source__max_position_embeddings=6))


def test_positions_that_a_scaling_adds_count():
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    assert positions(LlamaConfig(max_position_embeddings=100, rope_parameters=scaled)) == 400


def test_a_character_that_the_tokenizer_does_not_know_is_named_with_its_row(tmp_path):
    tiny_recipe(tmp_path)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"id": 9, "prompt": "abz"}\n')
    with pytest.raises(DataError, match=r"the character 'z' at .*train\.jsonl, line 9"):
        dry_run(tiny_recipe(tmp_path))


def test_disk_is_planned_by_what_a_checkpoint_holds(tmp_path):
    parts = plan_of(tiny_recipe(tmp_path, checkpoint__keep=2)).disk_bytes
    assert (
        parts["checkpoints"] == (2 + 1) * 3 * 4 * NUM_WEIGHTS
    )  # weights and two moments, one more while it is written
    assert parts["model"] == 4 * NUM_WEIGHTS
    with_best = plan_of(tiny_recipe(tmp_path, checkpoint={"keep": 2, "keep_best": {}})).disk_bytes
    assert with_best["checkpoints"] == (2 + 1 + 1) * 3 * 4 * NUM_WEIGHTS
    lora = {"rank": 2, "targets": ["q_proj"]}
    adapted = plan_of(tiny_recipe(tmp_path, checkpoint__keep=1, model__lora=lora)).disk_bytes
    assert adapted["checkpoints"] == 2 * 3 * 4 * 2 * (16 + 16)


def test_a_plan_of_disk_is_what_a_run_leaves(tmp_path):
    recipe = tiny_recipe(tmp_path, checkpoint__keep=1, model__source__hidden_size=64)
    planned = plan_of(recipe).disk_bytes
    folder, _ = start(recipe)

    def size(path):
        return sum(f.stat().st_size for f in path.rglob("*") if f.is_file())

    small = 100_000  # indices, block in flight, state of generators, tokenizer
    assert planned["checkpoints"] / 2 <= size(folder.checkpoints) <= planned["checkpoints"] / 2 + small
    assert planned["model"] <= size(folder.model) <= planned["model"] + small


def test_a_disk_that_is_too_small_is_found_before_the_run_and_shown_in_the_plan(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    recipe = tiny_recipe(tmp_path)
    assert "a start here is refused: 1.0 KiB are free" in dry_run(recipe)
    with pytest.raises(UnavailableError, match=r"[KM]iB at .*tiny.*checkpoint\.keep"):
        start(recipe)
    assert not any((tmp_path / "runs").glob("*"))


def test_a_device_that_is_absent_is_found_too(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="CUDA"):
        dry_run(tiny_recipe(tmp_path, model__device="cuda"))
