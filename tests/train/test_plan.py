"""The plan by hand, without weights and without a run folder."""

import pytest

from logitless.errors import ConfigurationError, LogitlessError
from logitless.train.plan import dry_run, plan_of
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
            tmp_path, train__tokens_per_micro_batch=100_000, model__source__num_hidden_layers=8, **changes
        )
        return plan_of(recipe).memory_bytes["activations or cache (estimate)"]

    assert activations(model__gradient_checkpointing=True) < activations() / 4


def test_sampling_holds_the_cache_and_one_layer_of_the_prompts_read_together(tmp_path):
    def sampling(**changes):
        recipe = tiny_recipe(tmp_path, data__max_prompt_tokens=100, train__tokens_per_micro_batch=110, **changes)
        return plan_of(recipe).memory_bytes["activations or cache (estimate)"]

    layers, kv_width, width, longest = 1, 16, 16, 100
    cache = 4 * 16 * (longest + 6) * layers * 2 * kv_width  # 4 bytes, 16 completions of 4 prompts
    assert sampling() == cache + 4 * 17 * width * 4 * longest
    assert sampling(rollout__prefill_tokens=250) == cache + 4 * 17 * width * 250
    assert sampling(rollout__prefill_tokens=50) == cache + 4 * 17 * width * longest  # a long prompt is read alone


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
    ],
)
def test_a_dry_run_finds_what_a_start_would_find(tmp_path, changes):
    with pytest.raises(LogitlessError):
        dry_run(tiny_recipe(tmp_path, **changes))


def test_a_device_that_is_absent_is_found_too(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="CUDA"):
        dry_run(tiny_recipe(tmp_path, model__device="cuda"))
