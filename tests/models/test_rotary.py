import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.cohere2.modeling_cohere2 import Cohere2RotaryEmbedding

from logitless.errors import UnavailableError
from logitless.models.lm_head import backbone_hidden, verify_packing
from logitless.models.loading import load_model
from logitless.models.rotary import LongRotary, check_rotary_lengths, separate_long_sequences
from tests.models.tiny import CONFIGS, packed, tiny

SWITCH = 12  # tokens up to which the tiny Phi-3 turns by its short factors


def as_transformers_has_it(name: str) -> nn.Module:
    """The same weights in a model of transformers that nobody touched."""
    fields = dict(CONFIGS[name])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="logitless_packed")
    model.load_state_dict(tiny(name).state_dict())
    return model.eval()


def alone(model: nn.Module, inputs) -> Tensor:
    parts = inputs.input_ids.split(list(inputs.lengths))
    with torch.no_grad():
        return torch.cat([model.model(input_ids=part[None], use_cache=False).last_hidden_state[0] for part in parts])


@pytest.mark.parametrize("attention", ["packed", "eager", "sdpa"])
@pytest.mark.parametrize("lengths", [[5, 30, 9], [SWITCH, SWITCH + 1, 1], [40, 40], [3, 4]])
def test_a_packed_row_of_short_and_long_sequences_equals_transformers_with_each_alone(lengths, attention):
    inputs = packed(lengths)
    with torch.no_grad():
        mine = backbone_hidden(tiny("phi3-longrope", attention=attention), inputs)
    torch.testing.assert_close(mine, alone(as_transformers_has_it("phi3-longrope"), inputs), rtol=1e-4, atol=1e-4)


def test_transformers_alone_would_turn_the_short_sequences_by_the_longest_ones_factors():
    """What the module is for: the same row through the untouched model is far off."""
    model, inputs = as_transformers_has_it("phi3-longrope"), packed([5, 30, 9])
    with torch.no_grad():
        off = (backbone_hidden(model, inputs) - alone(model, inputs)).abs()
    assert off[5:35].max() < 1e-4
    assert off[:5].max() > 0.1


def test_the_load_time_check_looks_past_the_length_where_scaling_begins():
    model = as_transformers_has_it("phi3-longrope")
    with pytest.raises(UnavailableError, match="separate_long_sequences"):
        verify_packing(model)
    assert separate_long_sequences(model) == 1
    verify_packing(model)


def test_angles_have_the_bits_of_the_sequence_alone():
    rotary = tiny("phi3-longrope").model.rotary_emb
    assert isinstance(rotary, LongRotary)
    lengths, x = [SWITCH, 1, SWITCH + 1, 30], torch.zeros(1)
    together = rotary(x, torch.cat([torch.arange(n) for n in lengths])[None])
    for n, cos, sin in zip(lengths, *(part[0].split(lengths) for part in together), strict=True):
        expected = rotary.rotary(x, torch.arange(n)[None])
        assert torch.equal(cos, expected[0][0])
        assert torch.equal(sin, expected[1][0])


def test_rows_of_a_padded_batch_turn_by_their_own_lengths():
    rotary, x = tiny("phi3-longrope").model.rotary_emb, torch.zeros(1)
    positions = torch.stack([torch.arange(20), (torch.arange(20) - 15).clamp(min=0)])  # 20 tokens; 15 paddings and 5
    cos, _ = rotary(x, positions)
    assert torch.equal(cos[1, 15:], rotary.rotary(x, torch.arange(5)[None])[0][0])
    assert torch.equal(cos[0], rotary.rotary(x, torch.arange(20)[None])[0][0])


def test_wrapping_twice_wraps_once_and_copies_and_state_dicts_are_as_before():
    model = tiny("phi3-longrope")
    assert separate_long_sequences(model) == 0
    assert model.state_dict().keys() == as_transformers_has_it("phi3-longrope").state_dict().keys()
    inputs = packed([5, 30])
    assert torch.equal(backbone_hidden(copy.deepcopy(model), inputs), backbone_hidden(model, inputs))


def test_longrope_in_some_layers_only_is_refused():
    config = CONFIGS["gemma3"] | {
        "rope_parameters": {
            "full_attention": CONFIGS["phi3-longrope"]["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    with pytest.raises(UnavailableError, match="longrope in some of them"):
        load_model(config, random_weights=True)


def test_dynamic_scaling_is_refused_beyond_the_length_where_it_begins():
    model = tiny("llama-dynamic")
    backbone_hidden(model, packed([64, 3]))
    with pytest.raises(
        UnavailableError, match="at most 64 tokens, where dynamic rotary scaling begins; given one of 65"
    ):
        backbone_hidden(model, packed([65, 3]))
    check_rotary_lengths(tiny("llama"), 65)


def test_modules_that_turn_pairs_side_by_side_are_wrapped_alike():
    config = AutoConfig.for_model(
        "cohere2", **{k: v for k, v in CONFIGS["phi3-longrope"].items() if k not in ("model_type", "pad_token_id")}
    )
    inner = Cohere2RotaryEmbedding(config)
    lengths, x = [3, 20], torch.zeros(1)
    together = LongRotary(inner)(x, torch.cat([torch.arange(n) for n in lengths])[None])[0][0].split(lengths)
    for n, cos in zip(lengths, together, strict=True):
        assert torch.equal(cos, inner(x, torch.arange(n)[None])[0][0])
