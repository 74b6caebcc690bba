"""Recurrent layers over packed rows, beyond the law of ``test_families``."""

import copy
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from logitless.errors import UnavailableError
from logitless.models.attention import AttentionLayout
from logitless.models.lm_head import backbone, backbone_hidden, check_sequence_group, verify_packing
from logitless.models.loading import compile_layers, load_model
from logitless.models.lora import frozen_copy
from logitless.models.mixers import keep_sequences_apart, recurrent_mixers
from logitless.models.packed_layout import PackedLayout, WholeSequences
from logitless.types import PackedInputs, PromptGroup
from tests.models.families import FAMILY
from tests.models.tiny import packed

HYBRIDS = ("qwen3_5_text", "nemotron_h", "lfm2", "falcon_h1")


def hybrid(name: str, **options) -> nn.Module:
    config = FAMILY[name].config
    return load_model(config, random_weights=True, seed=1, **options).eval()


def rows() -> PackedInputs:
    return packed([5, 1, 9, 30, 2], vocabulary=40)


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_an_operation_by_bucket_is_that_on_each_sequence(lengths):
    x = torch.randn(sum(lengths), 3, generator=torch.Generator().manual_seed(0))
    found = PackedLayout(tuple(lengths)).by_bucket(lambda batch: batch.cumsum(1), x)
    torch.testing.assert_close(found, torch.cat([part.cumsum(0) for part in x.split(lengths)]))


def test_sequences_in_chunks_begin_anew_with_each_sequence():
    layout = PackedLayout((3, 8, 1))
    assert layout.cut(4).lengths == (3, 4, 4, 1)
    assert layout.cut(4) is layout.cut(4)
    assert layout.cut(8) is layout


def test_a_shared_prompt_is_repeated_for_each_completion_and_found_at_its_first_place():
    layout = AttentionLayout([PromptGroup(2, (1, 3)), PromptGroup(0, (2,))])
    whole = WholeSequences.of(layout)
    assert whole.layout.lengths == (3, 5, 2)
    x = torch.arange(8.0)
    assert torch.equal(whole.repeated.take(x)[whole.kept], x)
    assert WholeSequences.of(layout) is whole


@pytest.mark.parametrize("name", HYBRIDS)
def test_other_sequences_of_the_row_change_no_bit(name):
    """Mixtures of experts may: their products' rows follow what others choose."""
    model, inputs = hybrid(name), rows()
    ids = inputs.input_ids.clone()
    ids[:5] = ids[:5].flip(0)
    changed = PackedInputs(ids, inputs.position_ids, inputs.lengths, inputs.source, inputs.source_counts)
    a, b = backbone_hidden(model, inputs), backbone_hidden(model, changed)
    assert not torch.equal(a[:5], b[:5])
    if "experts" not in FAMILY[name].parts:
        assert torch.equal(a[5:], b[5:])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1"])
def test_attention_with_a_mask_gives_the_same_hidden_states(name, attention):
    found, expected = (backbone_hidden(hybrid(name, attention=each), rows()) for each in (attention, "packed"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_layer_that_is_not_kept_apart_is_found_by_its_numbers(monkeypatch):
    monkeypatch.setattr("logitless.models.loading.keep_sequences_apart", lambda model: len(recurrent_mixers(model)))
    with pytest.raises(UnavailableError, match="sequences see each other"):
        hybrid("qwen3_5_text")


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_copy_runs_its_own_layers(name):
    model = hybrid(name)
    for copied in (copy.deepcopy(model), frozen_copy(model)):
        assert torch.equal(backbone_hidden(copied, rows()), backbone_hidden(model, rows()))
        with torch.no_grad():
            for mixer in recurrent_mixers(copied):
                mixer.out_proj.weight.zero_()
        assert not torch.equal(backbone_hidden(copied, rows()), backbone_hidden(model, rows()))
        verify_packing(copied)


def test_a_pass_in_another_thread_sees_no_layout_of_this_one():
    model, inputs = hybrid("lfm2"), rows()
    expected = backbone(model)(input_ids=inputs.input_ids[None], use_cache=False).last_hidden_state
    found, inside = [], threading.Event()

    def plain_pass() -> None:
        found.append(backbone(model)(input_ids=inputs.input_ids[None], use_cache=False).last_hidden_state)
        inside.set()

    def wait(*_) -> None:
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=plain_pass)
            other.start()
            inside.wait()
            other.join()

    model.model.layers[0].feed_forward.register_forward_pre_hook(wait)
    backbone_hidden(model, inputs)
    assert torch.equal(found[0], expected)


def test_an_error_inside_a_layer_leaves_no_layout_behind():
    model, inputs = hybrid("lfm2"), rows()
    expected = backbone(model)(input_ids=inputs.input_ids[None], use_cache=False).last_hidden_state
    hook = model.model.layers[0].feed_forward.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backbone_hidden(model, inputs)
    hook.remove()
    found = backbone(model)(input_ids=inputs.input_ids[None], use_cache=False).last_hidden_state
    assert torch.equal(found, expected)


def test_weights_that_come_later_find_layers_that_are_kept_apart():
    empty = hybrid("qwen3_5_text", empty=True)
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    model = hybrid("qwen3_5_text")
    empty.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(backbone_hidden(empty.eval(), rows()), backbone_hidden(model, rows()))


def test_ranks_that_share_a_row_are_refused():
    with pytest.raises(UnavailableError, match="recurrent layers, which need every token"):
        check_sequence_group(hybrid("qwen3_5_text"), 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_run_recurrent_ones_as_they_are():
    torch._dynamo.reset()
    model, expected = hybrid("lfm2"), backbone_hidden(hybrid("lfm2"), rows())
    compile_layers(model, backend="eager")
    torch.testing.assert_close(backbone_hidden(model, rows()), expected)
    torch._dynamo.reset()


def test_a_model_of_attention_alone_is_left_as_it_is():
    model = load_model(FAMILY["llama"].config, random_weights=True)
    assert keep_sequences_apart(model) == 0
    assert not recurrent_mixers(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
