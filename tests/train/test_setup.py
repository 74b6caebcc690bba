"""From a recipe to its parts: what is built is what was asked for, and what does not fit together is refused."""

import json
import logging

import pytest
import torch

from logitless.errors import ConfigurationError, DataError
from logitless.models.lora import adapters_off
from logitless.models.value_head import ValueHead, save_value_head
from logitless.objective.value import ValueLoss
from logitless.rewards.suites import OverlapWarning
from logitless.rollout.environment import Reply
from logitless.rollout.transformers import TransformersEngine
from logitless.train.engines import Engines
from logitless.train.run import start
from logitless.train.setup import (
    algorithm_of,
    allocator_of_environment,
    data_of,
    device_of,
    effects,
    policy_model,
    rewards_of,
    set_process,
    tokenizer_of,
    value_head_of,
)
from tests.train.tiny import give_chat_template, tiny_recipe

CPU = torch.device("cpu")


def _model(recipe, **options):
    return policy_model(recipe.model, tokenizer_of(recipe.model), seed=recipe.seed, device=CPU, **options)


def test_auto_is_a_device_that_exists_and_an_absent_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(tiny_recipe(tmp_path, model__device="auto").model) == CPU
    with pytest.raises(ConfigurationError, match=r"CUDA.*cpu or auto"):
        device_of(tiny_recipe(tmp_path, model__device="cuda:1").model)


def test_a_config_alone_has_no_tokenizer(tmp_path):
    with pytest.raises(ConfigurationError, match=r"Set model\.tokenizer"):
        tokenizer_of(tiny_recipe(tmp_path, model__tokenizer=None).model)


def test_every_prompt_and_turn_is_rendered_with_the_recipes_variables_of_the_chat_template(tmp_path):
    give_chat_template(tmp_path)
    changes = {
        "model__chat_template_kwargs": {"mood": "good"},
        "warm_start": {"data": {"name": "file", "path": str(tmp_path / "train.jsonl")}, "steps": 1},
        "evaluation__sets": {"more": {"data": {"name": "file", "path": str(tmp_path / "held_out.jsonl")}}},
        "rollout__environment": {"name": "own", "factory": "tests.train.test_setup:_Hums"},
        "rollout__limits": {"max_turns": 2, "max_tokens": 20},
        "rollout__sampling": {"max_new_tokens": 6},
        "train__blocks": 1,
    }
    recipe = tiny_recipe(tmp_path, **changes)
    data = data_of(recipe, tokenizer_of(recipe.model))
    read = [*data.train, *data.held_out, *data.warm_start, *data.held_out_sets["more"]]
    assert len(read) > 10
    assert all(prompt.text.endswith("gd") and len(prompt.token_ids) == 4 for prompt in read)
    asked = []

    class Noting(TransformersEngine):
        def sample(self, prompts, *arguments, **options):
            asked.extend(prompts)
            return super().sample(prompts, *arguments, **options)

    def open_noting(recipe, model, tokenizer):
        engine = Noting(model, tokenizer)
        return Engines(engine, engine)

    start(recipe, open_engines=open_noting)
    assert all(prompt.text.endswith("gd") for prompt in asked if prompt.text)
    later = [tokenizer_of(recipe.model).decode(prompt.token_ids) for prompt in asked if not prompt.text]
    assert later  # second turns, which have no text of their own
    assert all(text.endswith("hgd") for text in later)
    with pytest.raises(ConfigurationError, match=r"another model.chat_template_kwargs"):
        start(tiny_recipe(tmp_path, **changes | {"model__chat_template_kwargs": {}}), resume=True)


class _Hums:
    """Answers every turn."""

    def start(self, prompt, *, seed):
        return None

    def reply(self, state, turn):
        return Reply(messages=({"role": "user", "content": "h"},))


def test_every_weight_of_full_fine_tuning_is_trained_in_float32(tmp_path):
    model = _model(tiny_recipe(tmp_path, model__dtype="bfloat16"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in model.parameters())
    assert model.training


def test_under_lora_the_base_is_frozen_in_its_dtype_and_the_adapter_is_float32(tmp_path):
    recipe = tiny_recipe(tmp_path, model__dtype="bfloat16", model__lora={"rank": 3, "targets": ["q_proj"]})
    model = _model(recipe)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert [tuple(p.shape) for p in trained.values()] == [(3, 16), (16, 3)]
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    lines = effects(recipe.model, CPU, model)
    assert "trained: 96 weights in float32" in lines
    assert any(line.startswith("frozen: 2,960 weights in bfloat16") for line in lines)


@pytest.mark.parametrize(
    ("lora", "changes", "words"),
    [
        ({"dropout": 0.1}, {"model__layers": "row_invariant"}, "leave dropout to training passes"),
        ({"dropout": 0.1}, {"rollout__engine": {"name": "gpu"}}, "leave dropout to training passes"),
        (
            {"modules_to_save": ["lm_head"]},
            {
                "rollout__engine": {
                    "name": "vllm_server",
                    "urls": ["http://127.0.0.1:1"],
                    "model": "a",
                    "weights": {"name": "adapter"},
                }
            },
            "vLLM loads no others",
        ),
        ({"dropout": 1.0}, {}, "dropout"),
    ],
)
def test_what_an_adapter_cannot_be_beside_is_refused_before_anything_is_loaded(tmp_path, lora, changes, words):
    with pytest.raises(ConfigurationError, match=words):
        tiny_recipe(tmp_path, model__lora=lora, **changes)


def test_modules_trained_whole_have_the_dtype_of_the_base(tmp_path):
    lora = {"rank": 2, "modules_to_save": ["lm_head"]}
    with pytest.raises(ConfigurationError, match="one dtype of the base model and of modules_to_save"):
        _model(tiny_recipe(tmp_path, model__lora=lora, model__dtype="bfloat16", model__trained_dtype="float32"))
    model = _model(tiny_recipe(tmp_path, model__lora=lora, model__dtype="bfloat16", model__trained_dtype="bfloat16"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_warm_started_adapter_is_merged_before_the_next_one_is_added(tmp_path):
    recipe = tiny_recipe(tmp_path, model__lora={"rank": 2, "targets": ["q_proj"]})
    warm = _model(recipe)
    with torch.no_grad():
        for parameter in warm.parameters():
            if parameter.requires_grad:
                parameter.fill_(0.1)
    warm.save_pretrained(str(tmp_path / "warm"))
    ids = torch.tensor([[3, 4, 5]])
    model = _model(recipe, weights=tmp_path / "warm")
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, warm(ids).logits)
        with adapters_off(model):  # the reference is the warm-started policy
            torch.testing.assert_close(model(ids).logits, warm(ids).logits)


def test_random_weights_follow_the_seed(tmp_path):
    one, same, other = (_model(tiny_recipe(tmp_path, seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_dropout_is_switched_off_and_said(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="logitless"):
        model = _model(tiny_recipe(tmp_path, model__source__attention_dropout=0.5))
    assert model.config.attention_dropout == 0.0
    assert "dropout" in caplog.text


def test_effects_are_read_back(tmp_path):
    recipe = tiny_recipe(
        tmp_path,
        model__gradient_checkpointing=True,
        model__matmul_precision="high",
        model__sdpa_backends=["math", "efficient"],
    )
    try:
        set_process(recipe.model, seed=5)
        drawn = torch.rand(1)
        text = "\n".join(effects(recipe.model, CPU, _model(recipe)))
    finally:
        torch.set_float32_matmul_precision("highest")
        everything = ["flash", "efficient", "cudnn", "math"]
        set_process(tiny_recipe(tmp_path, model__sdpa_backends=everything).model, seed=5)
    assert "attention logitless_packed; SDPA may use efficient, math" in text
    assert "gradient checkpointing on, compile off" in text
    assert "'high'" in text
    set_process(tiny_recipe(tmp_path).model, seed=5)
    assert torch.equal(drawn, torch.rand(1))


@pytest.mark.parametrize("is_initialized", [False, True])
def test_the_allocator_is_set_also_where_cuda_was_asked_for_its_devices_before(tmp_path, monkeypatch, is_initialized):
    given = list[str]()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    with monkeypatch.context() as without:
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            without.setenv(name, "")  # restored, also after what is set below
        set_process(tiny_recipe(tmp_path).model, seed=5)
        assert allocator_of_environment() == "expandable_segments:True"
        assert given == (["expandable_segments:True"] if is_initialized else [])
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    given.clear()
    set_process(tiny_recipe(tmp_path).model, seed=5)
    assert (allocator_of_environment(), given) == ("max_split_size_mb:64", [])


def test_held_out_texts_are_not_trained_on(tmp_path):
    recipe = tiny_recipe(tmp_path)
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"id": "x", "prompt": "ah", "answer": "ha"}) + "\n")
    data = data_of(recipe, tokenizer_of(recipe.model))
    assert {p.text for p in data.train} & {p.text for p in data.held_out} == set()
    assert (len(data.train), data.counts["train"]["held_out"]) == (7, 1)


def test_held_out_texts_are_not_warmed_up_on_either(tmp_path):
    recipe = tiny_recipe(tmp_path, warm_start={"data": {"name": "file", "path": str(tmp_path / "train.jsonl")}})
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"id": "x", "prompt": "ah", "answer": "ha"}) + "\n")
    assert "ah" not in {p.text for p in data_of(recipe, tokenizer_of(recipe.model)).warm_start}


def test_fewer_prompts_than_a_block_needs_is_an_error_with_the_account(tmp_path):
    recipe = tiny_recipe(tmp_path, rollout__prompts_per_block=9)
    with pytest.raises(DataError, match=r"prompts_per_block = 9.*given 8.*'rows': 8"):
        data_of(recipe, tokenizer_of(recipe.model))


def test_rewards_are_checked_against_every_row(tmp_path):
    recipe = tiny_recipe(tmp_path, rewards=[{"name": "exact", "column": "solution"}])
    data = data_of(recipe, tokenizer_of(recipe.model))
    with pytest.raises(ConfigurationError, match="'solution'"):
        rewards_of(recipe, data.train)


def test_instructions_that_are_trained_on_and_held_out_give_a_warning_that_names_them(tmp_path):
    recipe = tiny_recipe(tmp_path, rewards=[{"name": "instructions"}])

    def write(name, *ids):
        rows = [{"prompt": pair, "instruction_id_list": list(ids), "kwargs": [{}] * len(ids)} for pair in name[1]]
        (tmp_path / name[0]).write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(("train.jsonl", ["ah", "bg", "cf", "de"]), "punctuation:no_comma", "startend:quotation")
    write(("held_out.jsonl", ["ca"]), "format:title_case", "startend:quotation")
    with pytest.warns(OverlapWarning, match=r"1 instruction ids .*: startend:quotation\. "):
        data_of(recipe, tokenizer_of(recipe.model))
    write(("held_out.jsonl", ["ca"]), "format:title_case")
    data_of(recipe, tokenizer_of(recipe.model))


def test_the_kl_of_the_loss_is_the_recipes(tmp_path):
    assert algorithm_of(tiny_recipe(tmp_path)).objective.kl.estimator == "k3"
    assert algorithm_of(tiny_recipe(tmp_path, kl__penalty={"estimator": "k2"})).objective.kl.estimator == "k2"
    in_reward = tiny_recipe(tmp_path, kl={"placement": "reward", "control": {"name": "fixed", "beta": 0.1}})
    assert algorithm_of(in_reward).objective.kl is None
    assert algorithm_of(tiny_recipe(tmp_path, kl=None)).objective.kl is None


def test_uncorrected_k1_in_the_loss_is_an_error(tmp_path):
    with pytest.raises(ConfigurationError, match="k1"):
        tiny_recipe(tmp_path, kl__penalty={"estimator": "k1"})
    corrected = tiny_recipe(tmp_path, kl__penalty={"estimator": "k1", "ratio_corrected": "token"})
    assert algorithm_of(corrected).objective.kl.ratio_corrected == "token"


def test_the_length_of_dr_grpo_is_the_limit_of_the_rollouts(tmp_path):
    assert algorithm_of(tiny_recipe(tmp_path, algorithm={"preset": "dr_grpo"})).weighting.max_new_tokens == 6
    given = {"preset": "dr_grpo", "parameters": {"max_new_tokens": 100}}
    assert algorithm_of(tiny_recipe(tmp_path, algorithm=given)).weighting.max_new_tokens == 100


def test_parts_of_a_preset_are_replaced_by_name(tmp_path):
    parts = {
        "preset": "grpo",
        "surrogate": {"name": "clip", "ratio_min": 0.5, "ratio_max": 3.0},
        "advantage": {"name": "leave_one_out"},
        "weighting": {"name": "token_mean"},
    }
    found = algorithm_of(tiny_recipe(tmp_path, algorithm=parts))
    assert (found.objective.surrogate.ratio_min, found.objective.surrogate.ratio_max) == (0.5, 3.0)
    assert (found.advantage.name, found.weighting.name) == ("leave_one_out", "token_mean")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": {"preset": "grpo", "advantage": {"name": "gae"}}}, r"Set algorithm\.value_loss"),
        ({"algorithm": {"preset": "grpo", "value_loss": {}}}, r"given group_standardized.*name: gae"),
        ({"algorithm": {"preset": "ppo", "advantage": {"name": "leave_one_out"}}}, r"given leave_one_out.*name: gae"),
        ({"algorithm": {"preset": "nll", "value_loss": {}}}, r"given none.*name: gae"),
        ({"value_head": {}}, r"Remove value_head"),
        ({"algorithm": {"preset": "ppo", "ratio": {"name": "sequence"}}}, r"'sequence'.*given gae.*name: token"),
        ({"algorithm": {"preset": "ppo", "ratio": {"name": "turn"}}}, r"'turn'.*given gae"),
        ({"algorithm": {"preset": "ppo", "surrogate": {"name": "gmpo"}}}, r"'gmpo'.*given gae"),
        (
            {"algorithm": {"preset": "gspo", "advantage": {"name": "reinforce_pp", "gamma": 0.9}}},
            r"'sequence'.*given reinforce_pp",
        ),
        (
            {
                "algorithm": {"preset": "gspo", "advantage": {"name": "reinforce_pp"}},
                "kl": {"placement": "reward", "control": {"name": "fixed", "beta": 0.1}},
            },
            r"'sequence'.*given reinforce_pp",
        ),
        ({"algorithm": {"preset": "grpoo"}}, "Did you mean 'grpo'"),
        ({"algorithm": {"preset": "grpo", "parameters": {"epsilom": 1}}}, "Did you mean 'epsilon'"),
        ({"rollout__completions_per_prompt": 1}, "at least two completions a prompt"),
        (
            {
                "algorithm": {"preset": "grpo", "advantage": {"name": "gdpo"}},
                "kl": {"placement": "reward", "control": {"name": "fixed", "beta": 0.1}},
            },
            r"Set kl\.placement: loss",
        ),
    ],
)
def test_parts_that_do_not_go_together_are_refused_with_a_repair(tmp_path, changes, message):
    with pytest.raises(ConfigurationError, match=message):
        algorithm_of(tiny_recipe(tmp_path, **changes))


@pytest.mark.parametrize(
    "algorithm",
    [
        {"preset": "ppo"},
        {"preset": "grpo", "advantage": {"name": "gae"}, "value_loss": {"coefficient": 1.0}},
        {"preset": "ppo", "ratio": {"name": "sequence", "advantage_within_sequence": "mean"}},
        {"preset": "ppo", "ratio": {"name": "sequence_token"}},
        {"preset": "ppo", "ratio": {"name": "turn"}, "advantage": {"name": "gae", "action": "turn"}},
        {"preset": "gspo", "advantage": {"name": "reinforce_pp"}},
    ],
)
def test_parts_that_go_together_are_let_through(tmp_path, algorithm):
    algorithm_of(tiny_recipe(tmp_path, algorithm=algorithm))


def test_the_value_loss_of_a_preset_is_kept_or_replaced(tmp_path):
    kept = algorithm_of(tiny_recipe(tmp_path, algorithm={"preset": "ppo"}))
    assert kept.value_loss == ValueLoss(coefficient=0.5, clip=0.2)
    value_loss = {"coefficient": 0.1, "clip": None}
    replaced = algorithm_of(tiny_recipe(tmp_path, algorithm={"preset": "ppo", "value_loss": value_loss}))
    assert replaced.value_loss == ValueLoss(coefficient=0.1, clip=None)


def test_a_value_head_is_made_for_a_value_loss_only_from_zeros_or_a_file(tmp_path):
    own = ValueHead(16)
    torch.nn.init.constant_(own.weight, 1.0)
    save_value_head(own, tmp_path / "own.safetensors")
    grpo, ppo = tiny_recipe(tmp_path), tiny_recipe(tmp_path, algorithm={"preset": "ppo"})
    named = tiny_recipe(tmp_path, algorithm={"preset": "ppo"}, value_head={"source": str(tmp_path / "own.safetensors")})
    model = _model(grpo)
    assert value_head_of(grpo, algorithm_of(grpo), model) is None
    for recipe, expected in ((ppo, 0.0), (named, 1.0)):
        found = value_head_of(recipe, algorithm_of(recipe), model)
        assert found.weight.tolist() == [[expected] * 16]


def test_a_correction_of_filtered_sampling_is_refused_unless_it_accepts_that(tmp_path):
    def recipe(**correction):
        algorithm = {"preset": "grpo", "correction": {"max": 2.0, **correction}}
        return tiny_recipe(tmp_path, algorithm=algorithm, rollout__sampling={"max_new_tokens": 6, "top_k": 3})

    with pytest.raises(ConfigurationError, match=r"top_k.*filtered_sampling='accept'"):
        recipe()
    assert algorithm_of(recipe(filtered_sampling="accept")).objective.correction.max == 2.0


def test_one_completion_is_enough_without_a_group(tmp_path):
    recipe = tiny_recipe(tmp_path, rollout__completions_per_prompt=1, algorithm={"preset": "reinforce_pp"})
    assert algorithm_of(recipe).advantage.name == "reinforce_pp"


@pytest.mark.parametrize(
    ("top_p", "correction", "said"),
    [(0.9, None, True), (0.9, {"max": 2.0, "filtered_sampling": "accept"}, False), (1.0, None, False)],
)
def test_sampling_from_another_distribution_is_said(tmp_path, caplog, top_p, correction, said):
    algorithm = {"preset": "grpo", "correction": correction}
    algorithm_of(tiny_recipe(tmp_path, rollout__sampling__top_p=top_p, algorithm=algorithm))
    assert ("to be on policy" in caplog.text) is said
