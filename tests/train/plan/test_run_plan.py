"""The plan by hand, without weights and without a run folder."""

import re
from types import SimpleNamespace

import pytest
import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, LlamaConfig, LlamaForCausalLM

from logitless.distributed.arrangement import Arrangement
from logitless.errors import ConfigurationError, DataError, UnavailableError
from logitless.train.assembly.checks import positions
from logitless.train.plan.run_plan import dry_run, plan_of
from logitless.train.plan.training_memory import layer_bytes, training_memory
from logitless.types import Completion
from tests.train.tiny import finished_run, recorded_engine, start, tiny_model, tiny_recipe

# The tiny Llama: an embedding and a head of 11 x 16, four projections of 16 x 16, three of 16 x 32, three norms of 16
NUM_WEIGHTS = 2 * 11 * 16 + 4 * 16 * 16 + 3 * 16 * 32 + 3 * 16


def test_steps_follow_from_tokens(tmp_path):
    plan = plan_of(tiny_recipe(tmp_path))
    assert (plan.completions_per_block, plan.tokens_per_block) == (16, 96)
    assert plan.steps_per_block == 4  # 96 tokens in steps of 40: 2, in each of 2 epochs
    assert (plan.steps, plan.first_prompt.text, plan.counts["train"]["rows"]) == (12, "ah", 8)
    # a step is at least a group
    assert plan_of(tiny_recipe(tmp_path, train__tokens_per_step=1)).steps_per_block == 2 * 4


def memory_of(tmp_path, **changes):
    return plan_of(tiny_recipe(tmp_path, **changes)).memory_bytes


ADAPTER = {"model__lora": {"rank": 2, "targets": ["q_proj"]}}


OF_ADAPTER = 2 * (16 + 16)


def test_memory_is_that_of_weights_gradients_moments_and_a_reference(tmp_path):
    parts = memory_of(tmp_path)
    assert parts["trained weights"] == parts["gradients"] == parts["reference"] == 4 * NUM_WEIGHTS
    assert parts["AdamW moments"] == 8 * NUM_WEIGHTS
    assert parts["frozen weights"] == 0
    assert "value head" not in parts
    assert "reference" not in memory_of(tmp_path, kl=None)
    assert memory_of(tmp_path, model__dtype="bfloat16")["reference"] == 2 * NUM_WEIGHTS
    parts = memory_of(tmp_path, model__dtype="bfloat16", **ADAPTER)
    assert parts["frozen weights"] == 2 * NUM_WEIGHTS
    assert parts["trained weights"] == 4 * OF_ADAPTER
    assert "reference" not in parts
    parts = memory_of(tmp_path, algorithm={"preset": "ppo"})
    assert parts["value head"] == 4 * 4 * (16 + 1)  # it has a gradient and moments, and no reference
    assert parts["trained weights"] == parts["reference"] == 4 * NUM_WEIGHTS


ACTIVATIONS = "activations or cache (estimate)"


def test_checkpointing_saves_activations(tmp_path):
    changes = {"train__tokens_per_micro_batch": 100_000, "model__source__num_hidden_layers": 16}
    plain, saving = (memory_of(tmp_path, **changes, model__gradient_checkpointing=on) for on in (False, True))
    assert saving[ACTIVATIONS] < plain[ACTIVATIONS] / 4


@pytest.mark.parametrize("recomputes", [True, False])
def test_the_plan_of_one_process_and_the_forecast_of_several_count_a_layer_alike(recomputes, tmp_path):
    tokens = 100_000
    recipe = tiny_recipe(tmp_path, train__tokens_per_micro_batch=tokens, model__gradient_checkpointing=recomputes)
    model = tiny_model(recipe, "meta")
    moments = training_memory(model, Arrangement(), tokens=tokens).moments
    row = 2 * 16 * 4 * tokens  # last hidden states and their gradient, which the plan counts to the head
    of_layers, of_end = (
        moments[at]["inputs of layers"] + moments[at]["recomputed in a layer"] for at in ("layers", "end")
    )
    assert plan_of(recipe).memory_bytes[ACTIVATIONS] == of_layers - row
    assert of_end - row == tokens * sum(layer_bytes(model, 4))


def test_sampling_holds_the_cache_and_one_layer_of_the_prompts_read_together(tmp_path):
    def sampling(**changes):
        return memory_of(tmp_path, data__max_prompt_tokens=100, train__tokens_per_micro_batch=110, **changes)[
            ACTIVATIONS
        ]

    layers, kv_width, width, longest = 1, 16, 16, 100
    cache = 4 * 16 * (longest + 6) * layers * 2 * kv_width  # 4 bytes, 16 completions of 4 prompts
    assert sampling() == cache + 4 * 17 * width * 4 * longest
    assert sampling(rollout__prefill_tokens=250) == cache + 4 * 17 * width * 250
    assert sampling(rollout__prefill_tokens=50) == cache + 4 * 17 * width * longest  # a long prompt is read alone


def test_eight_billion_weights_are_planned_without_being_made(tmp_path):
    source = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    source |= {"num_attention_heads": 32, "num_key_value_heads": 8}
    changes = {f"model__source__{key}": value for key, value in source.items()}
    assert memory_of(tmp_path, kl=None, **changes)["trained weights"] == 4 * 8_030_261_248  # Llama 3.1 8B


def test_the_text_names_each_part_and_writes_nothing(tmp_path):
    text = dry_run(tiny_recipe(tmp_path))
    parts = ("tiny: checked", "4 prompts x 4 completions = 16", "at most 96 scored tokens", "AdamW moments", "total")
    assert all(part in text for part in parts)
    assert not (tmp_path / "runs").exists()


def test_the_text_says_what_a_gpu_needs_of_its_host_and_whether_this_one_has_it(tmp_path, monkeypatch):
    moments = {"train__optimizer": {"moments": "host"}, "model__trained_dtype": "bfloat16"}
    recipe = tiny_recipe(tmp_path, model__device="auto", **moments)
    text = dry_run(recipe)
    assert "memory of the host beside a GPU, most while writing the model" in text
    assert "master weights and optimizer state, page-locked" in text
    assert "available here" not in text
    monkeypatch.setattr("logitless.train.plan.run_plan.free_host_memory", lambda: 1000)
    assert "more than is available here: 1.0 KiB" in dry_run(recipe)
    assert "more than is available here: 1.0 KiB" in dry_run(tiny_recipe(tmp_path))
    assert "host" not in dry_run(tiny_recipe(tmp_path))
    if not torch.cuda.is_available():
        assert "host" not in dry_run(tiny_recipe(tmp_path, model__device="auto"))


def test_the_text_names_what_replaces_parts_of_the_preset(tmp_path):
    own = {"name": "own", "factory": "logitless.objective.surrogate:Clip"}
    text = dry_run(tiny_recipe(tmp_path, algorithm={"surrogate": own, "advantage": {"name": "leave_one_out"}}))
    assert "surrogate          logitless.objective.surrogate:Clip" in text
    assert "advantage          leave_one_out" in text
    assert "weighting" not in text


OWN = "logitless.rollout.environments.text_game:GuessingGame"


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"name": "guessing"}, "guessing"),
        ({"name": "own", "factory": OWN}, f"own ({OWN})"),
    ],
)
def test_the_text_names_the_environment_where_there_is_one(tmp_path, environment, named):
    whole = environment | {"template": "{reply}"}
    recipe = tiny_recipe(tmp_path, rollout__environment=whole, rollout__limits={"max_tokens": 16})
    assert f"\n  environment        {named}\n" in dry_run(recipe)
    assert "environment" not in dry_run(tiny_recipe(tmp_path))


def test_a_dry_run_looks_at_no_run_folder(tmp_path):
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    dry_run(tiny_recipe(tmp_path))


def _recorded(tmp_path, tokens=(3, 4)):
    completions = [Completion(str(prompt), tokens, "ab", "stop") for prompt in range(8) for _ in range(4)]
    return {"rollout__engine": recorded_engine(tmp_path, completions)}


@pytest.mark.parametrize("token", [11, -1])
def test_a_recorded_token_that_the_model_does_not_have_is_found(tmp_path, token):
    dry_run(tiny_recipe(tmp_path, **_recorded(tmp_path)))
    with pytest.raises(DataError, match=f"given {token} in a completion of prompt '0'"):
        dry_run(tiny_recipe(tmp_path, **_recorded(tmp_path, (3, token))))


def test_a_prompt_with_too_few_recorded_completions_is_found(tmp_path):
    with pytest.raises(DataError, match="given 4 of prompt '0'"):
        dry_run(tiny_recipe(tmp_path, **_recorded(tmp_path), rollout__completions_per_prompt=5))


@pytest.mark.parametrize(
    ("template", "error", "said"),
    [
        ("{{ hintt }}{{ prompt }}", DataError, "given hintt"),
        ("{{ answer }", ConfigurationError, "a Jinja template"),
    ],
)
def test_a_template_of_a_teacher_that_cannot_be_rendered_is_found(tmp_path, template, error, said):
    teacher = {"source": "self", "divergence": "reverse_kl", "template": template}
    with pytest.raises(error, match=said):
        dry_run(tiny_recipe(tmp_path, teacher=teacher))


def test_a_column_without_texts_to_imitate_is_found(tmp_path):
    engine = {"name": "recorded", "column": "solution"}
    with pytest.raises(DataError, match="column 'solution' of every prompt"):
        dry_run(
            tiny_recipe(
                tmp_path, rollout__engine=engine, rollout__completions_per_prompt=1, algorithm={"preset": "nll"}
            )
        )


def test_the_longest_sequence_may_fill_the_models_positions_exactly(tmp_path):
    # prompts of 2 tokens and 6 new ones, of which the last is drawn and not read
    dry_run(tiny_recipe(tmp_path, model__source__max_position_embeddings=7))


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
    def disk(**changes):
        return plan_of(tiny_recipe(tmp_path, **changes)).disk_bytes

    # weights and two moments, one more while it is written
    parts = disk(checkpoint__keep=2)
    assert (parts["checkpoints"], parts["model"]) == ((2 + 1) * 3 * 4 * NUM_WEIGHTS, 4 * NUM_WEIGHTS)
    assert disk(checkpoint={"keep": 2, "keep_best": {}})["checkpoints"] == (2 + 1 + 1) * 3 * 4 * NUM_WEIGHTS
    assert disk(checkpoint__keep=1, **ADAPTER)["checkpoints"] == 2 * 3 * 4 * OF_ADAPTER


def test_a_plan_of_disk_is_what_a_run_leaves(tmp_path):
    changes = {"checkpoint__keep": 1, "model__source__hidden_size": 64}
    planned = plan_of(tiny_recipe(tmp_path, **changes)).disk_bytes
    folder = finished_run(tmp_path, **changes)

    def size(path):
        return sum(f.stat().st_size for f in path.rglob("*") if f.is_file())

    small = 100_000  # indices, block in flight, state of generators, tokenizer
    assert planned["checkpoints"] / 2 <= size(folder.checkpoints) <= planned["checkpoints"] / 2 + small
    assert planned["model"] <= size(folder.model) <= planned["model"] + small


def test_a_disk_that_is_too_small_is_found_before_the_run_and_shown_in_the_plan(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    recipe = tiny_recipe(tmp_path)
    assert re.search(r"a start here is refused: needed .* given 1\.0 KiB free", dry_run(recipe))
    with pytest.raises(UnavailableError, match=r"[KM]iB at .*tiny.*checkpoint\.keep"):
        start(recipe)
    assert not any((tmp_path / "runs").glob("*"))


def test_an_output_that_cannot_be_written_is_found_before_the_run_and_shown_in_the_plan(tmp_path):
    (tmp_path / "file").write_text("")
    recipe = tiny_recipe(tmp_path, output=str(tmp_path / "file"))
    assert "file, which is a file. Choose another `output`" in dry_run(recipe)
    with pytest.raises(UnavailableError, match="which is a file"):
        start(recipe)


def test_a_device_that_is_absent_is_found_too(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="CUDA"):
        dry_run(tiny_recipe(tmp_path, model__device="cuda"))


def test_a_mixture_keeps_what_its_chosen_and_shared_experts_make_of_a_token():
    options = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    options |= {"head_dim": 8, "vocab_size": 11, "moe_intermediate_size": 4, "n_routed_experts": 8}
    mixture = Glm4MoeForCausalLM(
        Glm4MoeConfig(
            **options, intermediate_size=99, num_experts_per_tok=3, n_shared_experts=2, first_k_dense_replace=0
        )
    )
    dense = LlamaForCausalLM(LlamaConfig(**options, intermediate_size=(3 + 2) * 4))
    inputs_and_outputs = 2 * 3 * 8 * 4
    assert [a - b for a, b in zip(layer_bytes(mixture, 4), layer_bytes(dense, 4), strict=True)] == [
        inputs_and_outputs
    ] * 2
