from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AddedToken, GenerationConfig, PreTrainedTokenizerFast

from logitless.errors import InputError, TrainingError, UnavailableError
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.loading import compile_layers
from logitless.models.lora import LoraOptions, add_lora
from logitless.rollout.completions import stop_ids
from logitless.rollout.engine import Weights
from logitless.rollout.sampling import SamplingOptions, sample
from logitless.rollout.transformers import TransformersEngine, _GrowingLayer
from logitless.types import Completion, Prompt
from tests.models.tiny import CONFIGS, tiny
from tests.rollout.plain_forward import check_logp

_init = _GrowingLayer.__init__
ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,;:?"


def tokenizer() -> PreTrainedTokenizerFast:
    made = character_tokenizer(ALPHABET)
    assert len(made) == 61
    return made


def prompts(*lengths: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(3, 61, (n,), generator=generator).tolist() for n in lengths]
    return [Prompt(id=f"p{i}", text="", token_ids=tuple(row)) for i, row in enumerate(ids)]


def tokens_of(groups: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.token_ids.tolist() for completion in group] for group in groups]


def engine_of(name: str = "llama", **options: Any) -> TransformersEngine:
    return TransformersEngine(tiny(name), tokenizer(), **options)


def speaking(end_bias: float) -> nn.Module:
    """A Llama that never samples pad or BOS; the bias sets the probability of EOS."""
    model = tiny("llama")
    bias = torch.zeros(61)
    bias[:3] = torch.tensor([-1e4, -1e4, end_bias])
    model.lm_head.bias = nn.Parameter(bias)
    return model


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "phi3-longrope"])
def test_logp_sampler_is_that_of_a_plain_forward_over_each_completion(name):
    engine, asked = engine_of(name), prompts(3, 9, 1, 9)
    options = SamplingOptions(max_new_tokens=12, temperature=0.8)
    groups = engine.sample(asked, 3, options, seed=1)
    assert [len(group) for group in groups] == [3] * 4
    check_logp(engine._model, asked, groups, options)


@pytest.mark.parametrize(("lengths", "max_new"), [((3, 1, 5), 7), ((13, 20), 10), ((3, 20, 13, 9), 3)])
def test_longrope_turns_prompts_of_one_batch_each_by_its_own_length(lengths, max_new):
    """The tiny Phi-3 switches its factors at 12 tokens."""
    engine, asked = engine_of("phi3-longrope"), prompts(*lengths)
    options = SamplingOptions(max_new_tokens=max_new)
    check_logp(engine._model, asked, engine.sample(asked, 2, options, seed=1), options)


def test_a_completion_in_which_longrope_would_turn_the_cached_keys_anew_is_refused():
    with pytest.raises(InputError, match=r"within 12 tokens, or a prompt beyond them.*'p1' of 12 tokens and 1 new"):
        engine_of("phi3-longrope").sample(prompts(11, 12), 1, SamplingOptions(max_new_tokens=1), seed=1)


def test_longrope_as_transformers_has_it_is_refused_where_it_matters():
    model = tiny("phi3-longrope")
    model.model.rotary_emb = model.model.rotary_emb.rotary
    engine, options = TransformersEngine(model, tokenizer()), SamplingOptions(max_new_tokens=5)
    engine.sample(prompts(7), 1, options, seed=1)
    with pytest.raises(InputError, match=r"goes by the longest. Load the model with logitless.models.loading"):
        engine.sample(prompts(13), 1, options, seed=1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error_that_names_token_prompt_and_version(temperature, value):
    """The logits are broken from the third new token after the prompt of 5 tokens."""
    model, asked = speaking(-1e4), prompts(3, 5)
    engine = TransformersEngine(model, tokenizer())
    engine.load(Weights.of(model), version=7)

    def break_positions(module, args, kwargs, output):
        hidden = output.last_hidden_state
        output.last_hidden_state = torch.where((kwargs["position_ids"] == 6)[..., None], value, hidden)
        return output

    model.model.register_forward_hook(break_positions, with_kwargs=True)
    options = SamplingOptions(max_new_tokens=3, temperature=temperature)
    named = r"2 of 4 completions, first for token 3 of prompt 'p1' \(sample 0\), with weights of version 7"
    with pytest.raises(TrainingError, match=named):
        engine.sample(asked, 2, options, seed=1)
    engine.sample(prompts(3), 2, options, seed=1)


def test_a_row_of_nan_ends_its_batch_and_its_token_is_a_valid_index():
    model, calls = tiny("llama"), []
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    model.model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(TrainingError, match="first for token 1"):
        TransformersEngine(model, tokenizer()).sample(prompts(3), 4, SamplingOptions(max_new_tokens=50), seed=1)
    assert len(calls) == 1
    assert sample(torch.full((2, 5), float("nan")), torch.tensor([0.0, 0.9], dtype=torch.float64)).tolist() == [4, 4]


@pytest.mark.parametrize("budget", [1, 18, 30, 45])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "gpt2", "gemma2"])
def test_a_prefill_in_parts_samples_what_one_in_whole_does(name, budget):
    asked = prompts(3, 9, 1, 14, 9, 9)
    options = SamplingOptions(max_new_tokens=10, repetition_penalty=1.2)
    widths = []
    whole = engine_of(name).sample(asked, 3, options, seed=1)
    engine = engine_of(name, prefill_tokens=budget)
    engine._model.base_model.register_forward_hook(
        lambda module, args, output: widths.append(output.last_hidden_state.shape[:2].numel())
    )
    parted = engine.sample(asked, 3, options, seed=1)
    assert max(widths) <= max(budget, 18)  # a step of 18 rows, the longest prompt is 14
    for a, b in zip(chain(*whole), chain(*parted), strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        torch.testing.assert_close(torch.tensor(a.logp_sampler), torch.tensor(b.logp_sampler), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("budget", [4, 16384])
def test_the_cache_is_kept_in_the_dtype_of_autocast_and_changes_no_bit(budget, monkeypatch):
    """Attention under autocast rounds keys to that dtype anyway: rounding them once gives the same numbers."""
    asked, options = prompts(3, 9), SamplingOptions(max_new_tokens=6)
    dtypes = set()
    view = _GrowingLayer._view

    def watched(self):
        keys, values = view(self)
        dtypes.update((keys.dtype, values.dtype))
        return keys, values

    monkeypatch.setattr(_GrowingLayer, "_view", watched)
    kept = engine_of(autocast=torch.bfloat16, prefill_tokens=budget).sample(asked, 2, options, seed=0)
    assert dtypes == {torch.bfloat16}
    monkeypatch.setattr(_GrowingLayer, "__init__", lambda self, autocast=None: _init(self, None))
    wide = engine_of(autocast=torch.bfloat16, prefill_tokens=budget).sample(asked, 2, options, seed=0)
    assert torch.float32 in dtypes
    assert kept == wide


@pytest.mark.parametrize(
    "filters",
    [
        {"top_p": 0.7},
        {"top_k": 4},
        {"min_p": 0.2},
        {"repetition_penalty": 1.5},
        {"top_p": 0.9, "top_k": 10, "repetition_penalty": 1.2, "temperature": 1.5},
        {"presence_penalty": 0.6, "frequency_penalty": 0.3, "logit_bias": ((5, -3.0),), "min_new_tokens": 3},
    ],
    ids=str,
)
def test_logp_sampler_includes_filters_penalties_bias_and_minimum(filters):
    engine, asked = engine_of(), prompts(3, 5)
    options = SamplingOptions(max_new_tokens=10, **filters)
    ends = stop_ids(engine.tokenizer, engine._model, options)
    groups = engine.sample(asked, 4, options, seed=1)
    check_logp(engine._model, asked, groups, options, ends=ends, rtol=1e-4, atol=1e-4)
    assert all(c.length > options.min_new_tokens or c.finish_reason == "length" for c in chain(*groups))


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "gemma3", "gpt2", "opt", "falcon"])
def test_temperature_zero_is_the_greedy_search_of_transformers(name):
    model, asked = tiny(name), prompts(3, 9, 1)
    completions = TransformersEngine(model, tokenizer()).sample(
        asked, 1, SamplingOptions(max_new_tokens=12, temperature=0.0, repetition_penalty=1.2), seed=0
    )
    config = GenerationConfig(
        max_new_tokens=12, do_sample=False, repetition_penalty=1.2, eos_token_id=2, pad_token_id=0, bos_token_id=1
    )
    for prompt, (completion,) in zip(asked, completions, strict=True):
        ids = torch.tensor(prompt.token_ids)[None]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        assert completion.token_ids.tolist() == out[0, ids.shape[1] :].tolist()
        assert set(completion.logp_sampler) == {0.0}


def test_the_same_seed_gives_the_same_completions_and_another_others():
    engine, asked = engine_of(), prompts(3, 5)
    options = SamplingOptions(max_new_tokens=8)
    first = engine.sample(asked, 3, options, seed=1)
    torch.manual_seed(99)
    assert engine.sample(asked, 3, options, seed=1) == first
    assert engine.sample(asked, 3, options, seed=2) != first
    assert len({completion.token_ids.tobytes() for group in first for completion in group}) == 6


@pytest.mark.parametrize("max_rows", [1, 4, 5, 512])
def test_a_completion_does_not_depend_on_the_batch_it_is_sampled_in(max_rows):
    model, asked = speaking(4.0), prompts(3, 9, 1, 5)
    options = SamplingOptions(max_new_tokens=20)
    whole = TransformersEngine(model, tokenizer()).sample(asked, 4, options, seed=1)
    other = TransformersEngine(model, tokenizer(), max_rows=max_rows)
    assert tokens_of(other.sample(asked, 4, options, seed=1)) == tokens_of(whole)
    alone = other.sample(asked[2:3], 2, options, seed=1)
    assert tokens_of(alone) == tokens_of([whole[2][:2]])


def test_ended_rows_leave_the_batch():
    model, rows = speaking(4.0), []
    model.register_forward_pre_hook(
        lambda module, arguments, named: rows.append(named["input_ids"].shape), with_kwargs=True
    )
    TransformersEngine(model, tokenizer()).sample(prompts(3, 3), 50, SamplingOptions(max_new_tokens=30), seed=1)
    assert rows[0] == (2, 3), "prompts are read once, not once a sample"
    assert rows[1][0] > 40
    assert rows[-1][0] < 10


def test_the_cache_grows_beyond_its_first_room():
    engine = TransformersEngine(speaking(-1e4), tokenizer())
    engine._config.max_position_embeddings = 400
    options = SamplingOptions(max_new_tokens=150)
    groups = engine.sample(prompts(4), 1, options, seed=11)
    assert groups[0][0].length == 150
    check_logp(engine._model, prompts(4), groups, options)


def test_a_stop_token_ends_a_completion_and_stays_in_its_ids():
    engine = TransformersEngine(speaking(4.0), tokenizer())
    (group,) = engine.sample(prompts(3), 40, SamplingOptions(max_new_tokens=10), seed=1)
    assert {c.finish_reason for c in group} == {"stop", "length"}
    for completion in group:
        if completion.finish_reason == "stop":
            assert completion.token_ids[-1] == 2
            assert len(completion.text) == completion.length - 1
        else:
            assert completion.length == 10
        assert 2 not in completion.token_ids[:-1]
        assert "<" not in completion.text


def test_stop_token_ids_of_the_caller_and_of_the_model_end_it_too():
    model, words = speaking(0.0), tokenizer()
    words.add_tokens([AddedToken(words.convert_ids_to_tokens(i), special=True) for i in (30, 31)])
    model.generation_config.eos_token_id = [2, 30, 31]
    options = SamplingOptions(max_new_tokens=40, stop_token_ids=(32, 33, 34, 35))
    (group,) = TransformersEngine(model, words).sample(prompts(3), 20, options, seed=1)
    ends = {2, 30, 31, 32, 33, 34, 35}
    last = {c.token_ids[-1] for c in group if c.finish_reason == "stop"}
    assert last & {30, 31}
    assert last & set(options.stop_token_ids)
    assert all(not ends & set(c.token_ids[:-1]) for c in group)
    assert all(len(c.text) == c.length - (c.finish_reason == "stop") for c in group)


def test_an_eos_token_that_is_ignored_is_a_token_like_others():
    model, words = speaking(0.0), tokenizer()
    (group,) = TransformersEngine(model, words).sample(
        prompts(3), 20, SamplingOptions(max_new_tokens=40, ignore_eos=True), seed=1
    )
    assert {(c.length, c.finish_reason) for c in group} == {(40, "length")}
    assert any(2 in c.token_ids[:-1] for c in group)


def test_an_end_that_the_config_names_by_default_is_an_ordinary_character_of_another_tokenizer():
    model = speaking(0.0)
    model.generation_config.eos_token_id = 30
    (group,) = TransformersEngine(model, tokenizer()).sample(prompts(3), 20, SamplingOptions(max_new_tokens=40), seed=1)
    assert any(30 in completion.token_ids[:-1] for completion in group)


def test_compiled_layers_are_sampled_without_compiling():
    model, asked, options = tiny("llama"), prompts(3), SamplingOptions(max_new_tokens=6)
    plain = TransformersEngine(model, tokenizer()).sample(asked, 3, options, seed=1)
    compile_layers(model, backend="eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert TransformersEngine(model, tokenizer()).sample(asked, 3, options, seed=1) == plain
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


def test_a_stop_string_cuts_the_text_before_it_and_the_ids_after_it():
    engine, asked = TransformersEngine(speaking(0.0), tokenizer()), prompts(3, 5)
    free = engine.sample(asked, 30, SamplingOptions(max_new_tokens=20), seed=1)
    texts = [c.text for group in free for c in group]
    stop = (texts[0][4:6], texts[40][7], texts[59][2:5])
    halted = engine.sample(asked, 30, SamplingOptions(max_new_tokens=20, stop=stop), seed=1)
    count = 0
    for before, after in zip(chain(*free), chain(*halted), strict=True):
        ends = [before.text.find(s) + len(s) for s in stop if s in before.text]
        if not ends:
            assert after.token_ids.tolist() == before.token_ids.tolist()
            continue
        count += 1
        assert after.finish_reason == "stop"
        assert after.token_ids.tolist() == before.token_ids[: after.length].tolist()
        assert after.text == before.text[: min(before.text.find(s) for s in stop if s in before.text[: min(ends)])]
        assert tokenizer().decode(after.token_ids, skip_special_tokens=True) == before.text[: min(ends)]
    assert count >= 3


def test_sampling_leaves_modes_gradients_and_generators_alone():
    model = tiny("llama").train()
    before = torch.get_rng_state()
    TransformersEngine(model, tokenizer()).sample(prompts(3), 2, SamplingOptions(max_new_tokens=3), seed=0)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_a_trained_model_is_sampled_with_its_new_weights():
    model, asked = tiny("llama"), prompts(3)
    engine = TransformersEngine(model, tokenizer())
    options = SamplingOptions(max_new_tokens=6)
    before = engine.sample(asked, 2, options, seed=0)
    with torch.no_grad():
        model.lm_head.weight.neg_()
    engine.load(Weights.of(model), version=3)
    after = engine.sample(asked, 2, options, seed=0)
    assert tokens_of(after[:1]) != tokens_of(before[:1])
    assert {c.weights_version for c in before[0]} == {0}
    assert {c.weights_version for c in after[0]} == {3}


def test_an_adapter_is_sampled_with():
    model, asked = add_lora(tiny("llama"), LoraOptions(rank=2, targets=("q_proj", "v_proj")), seed=1), prompts(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.5)
    options = SamplingOptions(max_new_tokens=6)
    groups = TransformersEngine(model, tokenizer()).sample(asked, 3, options, seed=0)
    check_logp(model.eval(), asked, groups, options)


def test_autocast_gives_float32_log_probabilities_of_bfloat16_products():
    asked, options = prompts(3), SamplingOptions(max_new_tokens=6)
    groups = engine_of(autocast=torch.bfloat16).sample(asked, 1, options, seed=0)
    check_logp(tiny("llama"), asked, groups, options, rtol=0.1, atol=0.2)


@pytest.mark.parametrize(
    ("model", "asked", "num_samples", "max_new_tokens", "message"),
    [
        ("llama", [Prompt("x", "", ())], 1, 3, "prompt 'x' with none"),
        ("llama", prompts(3) * 2, 1, 3, "'p0' more than once"),
        ("gpt2", prompts(10), 1, 55, "within the model's 64 positions"),
        ("llama", prompts(3), 0, 3, "at least 1 sample"),
    ],
)
def test_what_cannot_be_sampled_is_refused(model, asked, num_samples, max_new_tokens, message):
    with pytest.raises(InputError, match=message):
        engine_of(model).sample(asked, num_samples, SamplingOptions(max_new_tokens=max_new_tokens), seed=0)


@pytest.mark.parametrize("setting", ["max_rows", "prefill_tokens"])
def test_an_engine_without_room_is_refused(setting):
    with pytest.raises(InputError, match=setting):
        engine_of(**{setting: 0})


def test_a_recurrent_model_is_refused():
    model = tiny("llama")
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(UnavailableError, match="linear_attention"):
        TransformersEngine(model, tokenizer())
