"""Row-invariant layers on small models: transformers' numbers, bitwise identical rows, and the report."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file

from bits_cases import LAWS, SECOND_GPU
from bits_laws import Laws, Sizes
from logitless.errors import UnavailableError
from logitless.float32_sums import end_to_end
from logitless.models.lm_head import backbone_hidden
from logitless.models.loading import load_model
from logitless.models.lora import LoraOptions, add_lora
from logitless.models.row_invariant import decoding
from logitless.models.row_invariant.coverage import uncovered
from logitless.models.row_invariant.decoding import prefill
from logitless.models.row_invariant.layers import install_row_invariant
from logitless.models.row_invariant.paged_attention import Chunk, PrefillLayout
from tests.models import bits_mutations, mixtures
from tests.models.tiny import CONFIGS, LLAMA, LONGROPE, adapted, packed, tiny

ONE_LAYER = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24}
PHI3 = {"model_type": "phi3", **LLAMA, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
PHI3["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
HYBRIDS = ("qwen3_5", "qwen3_5_moe_text", "qwen3_next")
TWO_LAYERS = ("gemma3", "gpt_oss", "glm4_moe", "llama4_text", *HYBRIDS)
"""With layers of two kinds."""
ROUTED = {"num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "num_key_value_heads": 2}
OWN = {
    "gpt_oss": {"sliding_window": 3, "rope_parameters": {**YARN, "truncate": False},
                "layer_types": ["sliding_attention", "full_attention"]},
    "glm4_moe": {"use_qk_norm": True, "attention_bias": True},
    "olmoe": {"head_dim": 4},
    "mixtral": {"sliding_window": 3, "head_dim": 4},
    "qwen3_moe": {"head_dim": 16, "norm_topk_prob": True},
    "qwen3_5_moe_text": {"head_dim": 16},
    "qwen3_next": {"norm_topk_prob": True, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "llama4_text": {"attention_chunk_size": 2, "floor_scale": 1, "attn_scale": 0.5, "interleave_moe_layer_step": 2},
}  # fmt: skip
MIXTURES = {name: mixtures.MIXTURES[name] | ROUTED | own for name, own in OWN.items()}
COVERED = {
    **MIXTURES,
    **{name: CONFIGS[name] for name in ("qwen2", "qwen3", "mistral-window", "gemma2", "gemma3", "qwen3_5")},
    "llama-rope-scaled": {**CONFIGS["llama"], "rope_parameters": LLAMA3_ROPE},
    "phi3": PHI3,
}
LENGTHS = [4, 1, 6]
ATTENTION = {"gpt_oss": "packed", "llama4_text": "packed"}  # whose eager ones do not keep packed sequences apart


def small(name, **options):
    """One layer, or one of each kind."""
    config = {**(COVERED | SCALED)[name], **ONE_LAYER}
    if name in TWO_LAYERS:
        config["num_hidden_layers"] = 2
    options["attention"] = ATTENTION.get(name, "eager")
    model = load_model(config, random_weights=True, seed=1, **options)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("bias", "sinks", "A_log")) or "norm" in parameter_name:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.3)
            if parameter_name.endswith("A_log"):
                parameter.sub_(3.0)  # of states that a token forgets, gradients of decays are rounding alone
    return model.eval()


def hidden_and_gradients(model, inputs, grad):
    hidden = backbone_hidden(model, inputs)
    (hidden.double() * grad).sum().backward()
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return hidden.detach().double(), gradients


def relative(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


def assert_near(found, wanted):
    """Hidden states and gradients of float32."""
    (hidden, gradients), (want_hidden, want) = found, wanted
    assert relative(hidden, want_hidden) < 1e-5
    assert set(gradients) == set(want)
    assert max(relative(gradients[n], want[n]) for n in want) < 3e-5


SCALED = {
    kind: {**CONFIGS["llama"], "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **more}}
    for kind, more in {"linear": {}, "yarn": YARN}.items()
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "qwen3_5_moe_text" else [])  # of parts that others have
        for name in (*COVERED, *SCALED)
    ],
)
def test_hidden_states_and_gradients_are_those_of_transformers_layers(name):
    model, inputs = small(name), packed(LENGTHS)
    grad = torch.randn(sum(LENGTHS), 16, dtype=torch.float64)
    wanted = hidden_and_gradients(model, inputs, grad)
    assert install_row_invariant(model).exact
    assert_near(hidden_and_gradients(model, inputs, grad), wanted)


@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_oss", "llama4_text"))]
)
def test_bfloat16_is_no_further_from_float64_than_transformers_layers(name):
    lengths = [40, 11, 29]  # of few tokens one decides
    inputs, grad = packed(lengths), torch.randn(sum(lengths), 16, dtype=torch.float64)
    model = small(name, dtype=torch.bfloat16)
    double = copy.deepcopy(model).double()
    double.set_experts_implementation("eager")  # torch's grouped products have no float64
    exact, exact_grads = hidden_and_gradients(double, inputs, grad)
    theirs, their_grads = hidden_and_gradients(model, inputs, grad)
    install_row_invariant(model)
    ours, our_grads = hidden_and_gradients(model, inputs, grad)
    assert relative(ours, exact) <= 1.3 * relative(theirs, exact)
    for name, want in exact_grads.items():
        if "embed" not in name and "sinks" not in name and name in our_grads:  # few sinks: chance decides
            assert relative(our_grads[name], want) <= 1.5 * relative(their_grads[name], want) + 2**-8


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.down_proj.weight"])
def test_a_second_derivative_is_refused_in_the_last_norm_and_in_layers(name):
    model = small("qwen2")
    install_row_invariant(model)
    hidden = backbone_hidden(model, packed(LENGTHS))
    with pytest.raises(UnavailableError, match="differentiated twice"):
        torch.autograd.grad(hidden.sum(), model.get_parameter(name), create_graph=True)


def test_installing_shows_in_the_model_and_is_taken_back():
    model = tiny("qwen3").train()
    originals, parameters = [model.model, *model.model.layers], dict(model.named_parameters())
    classes, before = [type(each) for each in originals], backbone_hidden(model, packed(LENGTHS))
    calls = []
    handle = originals[1].register_forward_hook(lambda *_: calls.append(1))
    installation = install_row_invariant(model)
    assert installation.exact
    assert "RowInvariantQwen3DecoderLayer" in str(model)
    ours = [model.model, *model.model.layers]
    assert all(isinstance(each, kind) for each, kind in zip(ours, classes, strict=True))  # as transformers finds them
    assert [type(each) for each in originals] == classes
    assert all(p is parameters[name] for name, p in model.named_parameters())
    backbone_hidden(model.eval(), packed(LENGTHS))
    assert calls == [1]
    handle.remove()
    installation.remove()
    assert [model.model, *model.model.layers] == originals
    assert "row_invariant" not in {name for each in originals for name in vars(each)}
    assert not any(each.training for each in originals)
    assert torch.equal(backbone_hidden(model, packed(LENGTHS)), before)
    assert calls == [1]


def test_a_copy_of_a_model_has_layers_of_its_own():
    model = tiny("qwen3")
    install_row_invariant(model)
    before, copied = backbone_hidden(model, packed(LENGTHS)), copy.deepcopy(model)
    torch.nn.init.zeros_(copied.model.layers[0].mlp.down_proj.weight)
    copied.model.row_invariant.remove()
    assert "RowInvariant" not in str(copied)
    assert not torch.equal(backbone_hidden(copied, packed(LENGTHS)), before)
    assert torch.equal(backbone_hidden(model, packed(LENGTHS)), before)


def test_a_saved_model_is_the_model_that_was_loaded(tmp_path):
    model = tiny("qwen3")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    install_row_invariant(model)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == before.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())


def test_generating_runs_as_before():
    model = tiny("qwen3")
    ids = torch.tensor([[5, 6, 7]])
    before = model(ids).logits
    install_row_invariant(model)
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (CONFIGS["gpt2"], "the architecture gpt2"),
        ({**CONFIGS["qwen3"], "attention_dropout": 0.1}, "attention dropout of 0.1"),
        ({**CONFIGS["llama"], "hidden_act": "relu"}, "the activation relu"),
        (CONFIGS["llama-dynamic"], "positions scaled by dynamic, which depends on the longest sequence"),
        (
            {**MIXTURES["llama4_text"], "rope_parameters": YARN},
            "queries and keys scaled by 1.13863 and then normed",
        ),
        ({**PHI3, "rope_parameters": LONGROPE}, "positions scaled by longrope, which depends on the longest sequence"),
    ],
)
def test_what_is_not_covered_is_named_and_the_model_left_alone(config, missing):
    model = load_model(config, random_weights=True, seed=1)
    installation = install_row_invariant(model)
    assert installation.missing == (missing,)
    assert not installation.exact
    assert "RowInvariant" not in str(model)
    with pytest.raises(UnavailableError, match="install_row_invariant"):
        prefill(model, torch.zeros(1, dtype=torch.long), PrefillLayout([Chunk(0, 1, (0,))], "cpu"), [])


def test_clipped_queries_keys_and_values_are_not_covered():
    model = load_model({**MIXTURES["olmoe"], **ONE_LAYER, "clip_qkv": 8.0}, random_weights=True, seed=1)
    assert uncovered(model) == ("queries, keys and values clipped at 8.0",)


def test_weights_of_several_dtypes_are_not_covered():
    model = tiny("llama").bfloat16()
    model.model.norm.float()
    assert uncovered(model) == ("weights of several dtypes: bfloat16, float32",)


def test_float32_weights_under_autocast_are_refused():
    model = tiny("llama")
    install_row_invariant(model)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnavailableError, match="float32 weights under autocast"):
        backbone_hidden(model, packed(LENGTHS))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dropout": 0.1}, "dropout in an adapter"),
        ({"modules_to_save": ("norm",)}, "modules of the decoder that are trained whole beside adapters"),
        ({"modules_to_save": ("embed_tokens",)}, "modules of the decoder that are trained whole beside adapters"),
        ({"modules_to_save": ("lm_head",)}, None),
    ],
)
def test_what_an_adapter_brings_that_the_layers_do_not_cover_is_named(options, reason):
    found = uncovered(add_lora(small("qwen3"), LoraOptions(rank=2, **options)))
    assert found == (() if reason is None else (reason,))


def test_adapters_lie_end_to_end_where_their_weights_do():
    model = add_lora(small("qwen3"), LoraOptions(rank=2))
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    install_row_invariant(model)
    modules = dict(model.named_modules())
    for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        of_layer = [next(m for n, m in modules.items() if n.endswith(name)) for name in names]
        for factor in ("lora_A", "lora_B"):
            assert end_to_end([getattr(module, factor)["default"].weight for module in of_layer]) is not None
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])


def test_adapters_may_come_after_the_layers():
    plain = small("qwen3")
    installation = install_row_invariant(plain)
    model, grad = adapted(plain), torch.randn(sum(LENGTHS), 16, dtype=torch.float64)
    found = hidden_and_gradients(model, packed(LENGTHS), grad)
    installation.remove()
    assert_near(found, hidden_and_gradients(model, packed(LENGTHS), grad))


@pytest.mark.parametrize("use_rslora", [False, True])
def test_lora_is_applied_unmerged_and_follows_the_switch_of_the_adapters(use_rslora):
    model = adapted(small("qwen3"), LoraOptions(rank=2, use_rslora=use_rslora))
    inputs = packed(LENGTHS)
    with torch.no_grad(), model.disable_adapter():
        plain = backbone_hidden(model, inputs)
    grad = torch.randn(sum(LENGTHS), 16, dtype=torch.float64)
    wanted = hidden_and_gradients(model, inputs, grad)
    install_row_invariant(model)
    assert_near(hidden_and_gradients(model, inputs, grad), wanted)
    with torch.no_grad(), model.disable_adapter():
        assert relative(backbone_hidden(model, inputs), plain) < 1e-5


FEW = Sizes(2, 2, 1, 2, (), packed=400, small=8, odd=6)


@pytest.mark.parametrize(
    "name",
    [
        "gpt_oss",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", *MIXTURES) if name != "gpt_oss"),
        pytest.param("qwen3_5", marks=pytest.mark.slow),
    ],
)
def test_every_law_holds(name):
    laws = Laws(small(name, dtype=torch.bfloat16).requires_grad_(False), "cpu", sizes=FEW)
    rows = {row["comparison"]: row for row in laws.rows(LAWS)}
    assert set(rows) == set(LAWS)
    assert {name: row["differ"] for name, row in rows.items()} == dict.fromkeys(LAWS, 0)
    assert min(row["tokens"] for row in rows.values()) > 0


def test_a_copy_of_the_model_on_another_device_is_compared_with_the_model():
    laws = Laws(small("qwen3", dtype=torch.bfloat16).requires_grad_(False), "cpu", sizes=FEW)
    rows = {row["comparison"]: row for row in laws.on_another_device(torch.device("cpu"))}
    assert {name: row["differ"] for name, row in rows.items()} == dict.fromkeys(SECOND_GPU, 0)
    assert min(row["tokens"] for row in rows.values()) > 0
    laws = Laws(small("qwen3").requires_grad_(False), "cpu", sizes=FEW)
    with bits_mutations.split_k():
        packed, decoded = laws.on_another_device(torch.device("cpu"))
    assert (packed["differ"], decoded["differ"] > 0) == (0, True)


@pytest.mark.parametrize("mutation", bits_mutations.ON_CPU)
def test_a_law_turns_red_when(mutation):
    laws = Laws(small("qwen3").requires_grad_(False), "cpu", sizes=FEW)
    with bits_mutations.MUTATIONS[mutation]():
        assert any(row["differ"] for row in laws.rows(["decoded, rows joining and leaving"]))


@pytest.mark.parametrize("left_out", ["chunks", "the temperature"])
def test_a_law_turns_red_when_decoding_leaves_out(left_out):
    laws = Laws(small("llama4_text").requires_grad_(False), "cpu", sizes=FEW)
    honest = {"chunks": decoding.decode_attention, "the temperature": decoding.rotate}[left_out]

    def mutant(*given, **options):
        return honest(*given, **options | {"chunks": {"window": None}, "the temperature": {"factor": None}}[left_out])

    with bits_mutations._while_decoding(decoding, honest.__name__, mutant):
        assert any(row["differ"] for row in laws.rows(["decoded, rows joining and leaving"]))


def test_a_law_turns_red_when_decoding_leaves_out_the_sinks():
    laws = Laws(small("gpt_oss").requires_grad_(False), "cpu", sizes=FEW)
    with bits_mutations._while_decoding(decoding, "with_sinks", lambda attended, *_: attended.flatten(1)):
        assert any(row["differ"] for row in laws.rows(["decoded, rows joining and leaving"]))
