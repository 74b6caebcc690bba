"""The bitwise exact engine on tiny models, under Triton's interpreter and without graphs."""

import logging
import weakref
from dataclasses import replace

import pytest
import torch

from logitless.errors import ConfigurationError, InputError, TrainingError, UnavailableError
from logitless.head import fused
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.loading import load_model
from logitless.models.lora import LoraOptions, add_lora
from logitless.models.row_invariant.coverage import FAMILIES
from logitless.rollout.engine import Weights
from logitless.rollout.gpu import steps
from logitless.rollout.gpu.engine import GpuEngine
from logitless.rollout.gpu.page_memory import PageMemory
from logitless.rollout.gpu.state_memory import slot_bytes
from logitless.rollout.gpu.steps import Steps, forms_of
from logitless.rollout.sampling import SamplingOptions
from logitless.train.learn.policy import Policy
from logitless.types import Prompt
from tests.models.families import FAMILY
from tests.models.mixtures import MIXTURES
from tests.models.tiny import CONFIGS
from tests.rollout.gpu.wide import with_random_vectors
from tests.rollout.plain_forward import check_logp, policy_logp, trainers_scores

pytest.importorskip("triton")

ALPHABET = "abcdefgh"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ONE_LAYER = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 11}
ONE_LAYER |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
ALIKE = ("olmoe", "mixtral", "qwen3", "llama", "mistral")
"""Families that a slow test is enough for, beside those that take longest."""
PROMPTS = [Prompt("a", "", (3, 4, 5)), Prompt("b", "", (6,)), Prompt("c", "", tuple(3 + i % 8 for i in range(70)))]


@pytest.fixture(autouse=True)
def interpreted_head(monkeypatch):
    """The fused head, as in training on a GPU, under the interpreter; and short rounds."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(steps, "STEPS", 3)
        monkeypatch.setattr(steps, "ALONE_BELOW", 0)
        monkeypatch.setattr(fused, "why_not", fused._unsupported)
    else:  # poison is written by a kernel of its own before every launch, which a captured graph would repeat
        torch.utils.deterministic.fill_uninitialized_memory = False


def model_of(name="qwen3", end_bias=None, **options):
    layers = {"num_hidden_layers": 2} if name in ("qwen3_5", "qwen3_next", "llama4_text") else {}  # one of each kind
    model = load_model(
        {**(CONFIGS | MIXTURES)[name], **ONE_LAYER, **layers}, random_weights=True, seed=1, device=DEVICE, **options
    ).eval()
    if end_bias is not None:
        model.lm_head.bias = torch.nn.Parameter(torch.tensor([-1e4, -1e4, end_bias] + [0.0] * 8, device=DEVICE))
    return model


def engine_of(model=None, **options):
    return GpuEngine(model or model_of(end_bias=0.0), character_tokenizer(ALPHABET), **options)


def flat(groups):
    return [completion for group in groups for completion in group]


def without_version(groups):
    return [replace(completion, weights_version=None) for completion in flat(groups)]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "qwen3"),
        pytest.param({"use_rslora": True}, "qwen3", marks=pytest.mark.slow),
        ({"modules_to_save": ("lm_head",)}, "qwen3"),
        ({"targets": ("lm_head", "q_proj")}, "qwen3"),
        pytest.param({}, "qwen3_moe", marks=pytest.mark.slow),
        ({"targets": ("q_proj",)}, "mixtral"),
        ({}, "qwen3_5"),
        pytest.param({}, "qwen3_next", marks=pytest.mark.slow),
        pytest.param({}, "llama4_text", marks=pytest.mark.slow),
    ],
    ids=["lora", "rslora", "trained-head", "head", "experts", "plain experts", "gated delta nets", "both", "chunks"],
)
def test_logp_sampler_and_entropy_are_the_trainers_in_every_bit(options, name):
    model = add_lora(model_of(name, end_bias=-1.0), LoraOptions(rank=2, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
            elif parameter.requires_grad and "lora_" not in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    engine, options = engine_of(model, prefill_tokens=40), SamplingOptions(max_new_tokens=5, temperature=0.8)
    assert engine.exact
    groups = engine.sample(PROMPTS, 2, options, seed=1)
    scores = trainers_scores(Policy(model), PROMPTS, groups, temperature=0.8)
    assert scores.logp.tolist() == [x for c in flat(groups) for x in c.logp_sampler]
    assert scores.entropy.tolist() == [x for c in flat(groups) for x in c.entropy_sampler]
    assert len(scores.logp) > 20


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(each, marks=pytest.mark.slow) if "qwen3_" in each or each in ALIKE else each for each in FAMILIES],
)
def test_every_exact_family_samples_with_the_trainers_bits(model_type):
    config = FAMILY[model_type].config | {"vocab_size": 11, "max_position_embeddings": 256}
    model = with_random_vectors(load_model(config, random_weights=True, seed=1, device=DEVICE))
    engine = engine_of(model)
    assert engine.exact
    groups = engine.sample(PROMPTS[:2], 2, SamplingOptions(max_new_tokens=3, ignore_eos=True), seed=1)
    scores = trainers_scores(Policy(model), PROMPTS[:2], groups, temperature=1.0)
    assert scores.logp.tolist() == policy_logp(groups)
    assert scores.entropy.tolist() == [x for c in flat(groups) for x in c.entropy_sampler]
    assert len(scores.logp) == 12


def test_a_completion_has_the_same_tokens_whatever_else_is_sampled():
    options = SamplingOptions(max_new_tokens=steps.STEPS + 2)  # more than a round
    engine = engine_of()
    together = engine.sample(PROMPTS, 2, options, seed=1)
    alone = engine.sample(PROMPTS[:1], 1, options, seed=1)
    few_rows = engine_of(max_rows=1, prefill_tokens=27).sample(PROMPTS[::2], 2, options, seed=1)
    assert alone[0] == together[0][:1]
    assert few_rows == together[::2]
    assert len({completion.token_ids.tobytes() for completion in flat(together)}) > 4
    assert flat(engine.sample(PROMPTS[:1], 2, options, seed=2)) != together[0]


@pytest.mark.slow
def test_states_begin_anew_in_every_slot_and_tokens_are_those_of_any_rows_and_memory():
    options, prompts = SamplingOptions(max_new_tokens=3), [*PROMPTS, Prompt("d", "", (4,) * 131)]
    model = model_of("qwen3_5", end_bias=-1.0)
    together = engine_of(model).sample(prompts, 2, options, seed=1)
    few = engine_of(model, max_rows=1, prefill_tokens=11)  # one prompt has a state at a time
    assert few.sample(prompts, 2, options, seed=1) == together
    assert few.sample(prompts[:1], 2, options, seed=1) == together[:1]


def test_recurrent_states_take_half_of_the_memory_and_too_little_is_an_error_that_names_what_fits():
    model = model_of("qwen3_5", end_bias=-1.0)
    each = slot_bytes(forms_of(engine_of(model)._model)[1], torch.float32)
    options = SamplingOptions(max_new_tokens=2)
    with pytest.raises(ConfigurationError, match=f"rollout.engine.memory to {6 * each}"):
        engine_of(model, memory=6 * each - 2).sample(PROMPTS[:1], 2, options, seed=1)
    engine = engine_of(model)
    groups = engine.sample(PROMPTS[:1], 4, options, seed=1)
    assert engine._steps.max_rows == 4
    engine.memory = 8 * each  # as where the optimizer's state has taken the rest
    assert engine.sample(PROMPTS[:1], 4, options, seed=1) == groups
    assert (engine._steps.max_rows, engine._steps.state_bytes) == (2, 4 * each)


def test_stop_ids_and_limits_end_completions():
    groups = engine_of(model_of(end_bias=0.0)).sample(PROMPTS[:2], 4, SamplingOptions(max_new_tokens=6), seed=3)
    for completion in flat(groups):
        assert 2 not in completion.token_ids[:-1]
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == 2 else "length")
        assert completion.length == 6 or completion.finish_reason == "stop"
        assert len(completion.logp_sampler) == completion.length
    assert {c.finish_reason for c in flat(groups)} == {"stop", "length"}


def test_an_eos_token_that_is_ignored_is_a_token_like_others():
    engine = engine_of(model_of(end_bias=0.0))
    found = flat(engine.sample(PROMPTS[:2], 4, SamplingOptions(max_new_tokens=6, ignore_eos=True), seed=3))
    assert {(c.length, c.finish_reason) for c in found} == {(6, "length")}
    assert any(2 in c.token_ids[:-1] for c in found)


def test_a_stop_string_cuts_the_text_before_it_and_the_ids_after_it():
    engine = engine_of(model_of(end_bias=-1e4))
    free = flat(engine.sample(PROMPTS[:2], 2, SamplingOptions(max_new_tokens=steps.STEPS + 5), seed=4))
    stop = free[0].text[4:6]
    cut = flat(engine.sample(PROMPTS[:2], 2, SamplingOptions(max_new_tokens=steps.STEPS + 5, stop=(stop,)), seed=4))
    for whole, completion in zip(free, cut, strict=True):
        at = whole.text.find(stop)
        assert completion.text == (whole.text if at < 0 else whole.text[:at])
        kept = whole.length if at < 0 else at + len(stop)
        assert completion.token_ids.tolist() == whole.token_ids[:kept].tolist()
        assert completion.finish_reason == ("length" if at < 0 else "stop")


@pytest.mark.parametrize(
    ("settings", "end_bias"),
    [
        ({"temperature": 0.9, "top_k": 6, "top_p": 0.8, "repetition_penalty": 1.5}, -1e4),
        ({"presence_penalty": 0.7, "frequency_penalty": 0.4, "logit_bias": ((5, -2.0),), "min_new_tokens": 3}, 2.0),
    ],
    ids=["filters", "penalties"],
)
def test_filters_penalties_bias_and_minimum_give_the_logp_of_a_plain_forward_and_hold_ends_back(settings, end_bias):
    engine, options = engine_of(model_of(end_bias=end_bias)), SamplingOptions(max_new_tokens=5, **settings)
    groups = engine.sample(PROMPTS[:2], 2, options, seed=1)
    check_logp(engine._model, PROMPTS[:2], groups, options, ends=[2])
    assert all(c.length > 3 or c.finish_reason == "length" for c in flat(groups))
    assert all(c.logp_policy is not None for c in flat(groups))


@pytest.mark.parametrize("filters", [{"top_p": 0.7}, {"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.3}], ids=str)
def test_with_filters_both_log_probs_come_out_of_one_pass_and_the_policys_has_the_trainers_bits(filters):
    model = model_of(end_bias=-1.0)
    engine, options = engine_of(model), SamplingOptions(max_new_tokens=4, temperature=0.8, **filters)
    groups = engine.sample(PROMPTS[:2], 2, options, seed=1)
    scores = trainers_scores(Policy(model), PROMPTS[:2], groups, temperature=0.8)
    assert scores.logp.tolist() == policy_logp(groups)
    assert scores.entropy.tolist() == [x for c in flat(groups) for x in c.entropy_sampler]
    sampled = torch.tensor([x for c in flat(groups) for x in c.logp_sampler])
    if "repetition_penalty" in filters:
        assert not torch.allclose(sampled, scores.logp.cpu())
    else:  # what is left has the probability of what was dropped too
        assert (sampled >= scores.logp.cpu() - 1e-5).all()
        assert (sampled > scores.logp.cpu() + 1e-2).any()


def test_the_steps_are_kept_from_call_to_call_and_made_anew_where_the_model_has_moved():
    model = model_of(end_bias=0.0)
    engine, options = engine_of(model), SamplingOptions(max_new_tokens=2)
    engine.sample(PROMPTS[:1], 2, options, seed=1)
    kept = engine._steps
    engine.sample(PROMPTS[:1], 1, options, seed=1)
    assert engine._steps is kept
    engine.sample(PROMPTS[2:], 1, options, seed=1)  # more pages
    assert engine._steps is not kept
    kept = engine._steps
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    engine.sample(PROMPTS[:1], 1, options, seed=1)
    assert engine._steps is not kept


def test_greedy_completions_are_the_same_and_certain_and_nothing_is_said_of_a_softmax():
    one, other = engine_of().sample(PROMPTS[:1], 2, SamplingOptions(max_new_tokens=3, temperature=0.0), seed=1)[0]
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.logp_sampler.tolist() == [0.0] * one.length
    assert (one.logp_policy, one.entropy_sampler) == (None, None)


@pytest.mark.slow
def test_out_of_memory_puts_rows_back_and_gives_the_same_tokens(monkeypatch, caplog):
    options = SamplingOptions(max_new_tokens=9)
    expected = engine_of().sample(PROMPTS[:2], 2, options, seed=1)
    calls = []

    def failing(self, place, rows, sampling):
        calls.append(len(place.slots))
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no room")
        return run(self, place, rows, sampling)

    run = Steps.run
    monkeypatch.setattr(Steps, "run", failing)
    with caplog.at_level(logging.WARNING, "logitless"):
        assert engine_of().sample(PROMPTS[:2], 2, options, seed=1) == expected
    assert "at most 2 rows" in caplog.text
    assert max(calls[2:]) == 2


def test_what_ran_out_of_memory_is_gone_before_sampling_goes_on(monkeypatch, caplog):
    made, left = [], []
    init, run = Steps.__init__, Steps.run

    def noted(self, *args, **kwargs):
        left.append([each() for each in made if each() is not None])
        made.append(weakref.ref(self))
        init(self, *args, **kwargs)

    def failing(self, *args):
        if len(made) == 1:
            raise torch.OutOfMemoryError("no room")
        return run(self, *args)

    monkeypatch.setattr(Steps, "__init__", noted)
    monkeypatch.setattr(Steps, "run", failing)
    engine_of().sample(PROMPTS[:2], 1, SamplingOptions(max_new_tokens=2), seed=1)
    assert "no room" in caplog.text  # a log that keeps its records, as this one does, keeps no graphs
    assert left == [[], []]


@pytest.mark.slow
def test_where_the_pages_do_not_fit_into_the_device_half_are_taken_and_tokens_are_the_same(monkeypatch):
    options = SamplingOptions(max_new_tokens=9)
    expected = engine_of().sample(PROMPTS, 2, options, seed=1)
    give, sizes = PageMemory.open, []

    def scarce(self, part_bytes):
        sizes.append(part_bytes)
        if len(sizes) == 1:
            raise torch.OutOfMemoryError("no room")
        return give(self, part_bytes)

    monkeypatch.setattr(PageMemory, "open", scarce)
    engine = engine_of()
    assert engine.sample(PROMPTS, 2, options, seed=1) == expected
    steps = engine._steps
    pages = [size // (steps.page_bytes // steps.memory.parts) for size in sizes]
    assert pages == [pages[0], pages[0] // 2]
    assert pages[0] > 6  # else half were what the longest prompt needs


def test_out_of_memory_with_a_single_row_is_raised(monkeypatch):
    def failing(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Steps, "run", failing)
    with pytest.raises(torch.OutOfMemoryError):
        engine_of().sample(PROMPTS[:1], 1, SamplingOptions(max_new_tokens=2), seed=1)


def test_ctrl_c_leaves_an_engine_that_samples_as_before(monkeypatch):
    engine, options = engine_of(), SamplingOptions(max_new_tokens=3)
    expected = engine.sample(PROMPTS[:1], 1, options, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(steps, "sample_tokens", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.sample(PROMPTS[:1], 1, options, seed=1)
    assert engine.sample(PROMPTS[:1], 1, options, seed=1) == expected


def test_logits_that_are_not_finite_are_an_error_that_names_token_prompt_version_and_layer():
    model = model_of()
    engine = engine_of(model)
    engine.load(Weights.of(model), version=7)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(TrainingError, match=r"token 1 of prompt 'a' \(sample 0\), with weights of version 7; layer 0"):
        engine.sample(PROMPTS[:1], 2, SamplingOptions(max_new_tokens=2), seed=1)


def test_a_budget_without_room_names_what_fits_and_little_room_gives_the_same_tokens():
    options = SamplingOptions(max_new_tokens=steps.STEPS + 2)
    page = 2 * 64 * 1 * 16 * 4  # keys and values, positions, key heads, width, bytes
    with pytest.raises(ConfigurationError, match=rf"rollout.engine.memory to {3 * page}"):
        engine_of(memory=2 * page).sample(PROMPTS, 1, options, seed=1)
    assert engine_of(memory=3 * page).sample(PROMPTS[1:], 2, options, seed=1) == engine_of().sample(
        PROMPTS[1:], 2, options, seed=1
    )


def test_what_cannot_be_sampled_is_refused():
    with pytest.raises(UnavailableError, match=r"the architecture gpt2.*name: transformers"):
        GpuEngine(load_model(CONFIGS["gpt2"], random_weights=True), character_tokenizer(ALPHABET))
    with pytest.raises(InputError, match="max_rows from 1 to 2048"):
        engine_of(max_rows=4096)
    with pytest.raises(InputError, match="within the model's 256 positions"):
        engine_of().sample(PROMPTS, 1, SamplingOptions(max_new_tokens=250), seed=1)


def test_the_models_own_layers_come_back_when_the_engine_is_closed():
    model = model_of()
    engine = engine_of(model)
    assert "RowInvariant" in str(model)
    engine.close()
    assert "RowInvariant" not in str(model)


def test_a_model_that_was_resized_between_blocks_is_sampled_as_it_is():
    model = model_of()
    engine, options = engine_of(model), SamplingOptions(max_new_tokens=3, logit_bias=((2, -100.0),))
    engine.sample(PROMPTS[:1], 1, options, seed=1)
    model.resize_token_embeddings(14, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[11:].copy_(50 * model.lm_head.weight[3:6])
    engine.load(Weights.of(model), 1)
    found = engine.sample(PROMPTS[:2], 3, options, seed=1)
    anew = engine_of(model).sample(PROMPTS[:2], 3, options, seed=1)
    assert without_version(found) == without_version(anew)
    assert any(token >= 11 for completion in flat(found) for token in completion.token_ids)


def test_a_model_that_was_cast_between_blocks_is_sampled_as_it_is():
    model = model_of(end_bias=0.0)
    engine, options = engine_of(model), SamplingOptions(max_new_tokens=3)
    engine.sample(PROMPTS[:1], 1, options, seed=1)
    model.bfloat16()
    engine.load(Weights.of(model), 1)
    again = engine_of(model_of(end_bias=0.0).bfloat16()).sample(PROMPTS[:1], 1, options, seed=1)
    found = engine.sample(PROMPTS[:1], 1, options, seed=1)
    assert without_version(found) == without_version(again)
