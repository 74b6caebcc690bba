"""Layers by CUDA graphs: the bits of the same row padded, gradients that add up, and no graph where it does not fit."""

import copy

import pytest
import torch

from logitless.models.attention import AttentionLayout
from logitless.models.lm_head import backbone
from logitless.models.lora import LoraOptions, add_lora
from logitless.models.row_invariant import layer_graphs
from logitless.models.row_invariant.functions import embedded
from logitless.models.row_invariant.layer_graphs import HostTables, PaddedLayout, rounded_rows
from logitless.models.row_invariant.layers import PackedRows, install_row_invariant
from logitless.types import PromptGroup
from tests.models.row_invariant.test_layers import COVERED, HYBRIDS, MIXTURES
from tests.models.row_invariant.test_layers_gpu import wide

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ordinary_memory")]
GROUPS = [PromptGroup(90, (200, 170)), PromptGroup(300), PromptGroup(66, (1, 1, 2))]
OTHERS = [PromptGroup(20, (300, 140)), PromptGroup(80, (270,))]  # of the same size, when padded
MANY = [PromptGroup(100, (20,) * 30)] * 3
TREE = [PromptGroup(100, (PromptGroup(20, (90, 70)), PromptGroup(70, (80, 80, 200))))]


def installed(name, *, lora=False, sums=False, graphs=True):
    model = wide(name)
    if lora:
        model = add_lora(model, LoraOptions(rank=8))
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(std=0.02)
    installation = install_row_invariant(model)
    if sums:
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
    if graphs:
        installation.graph_short_rows()
    return model


def row_of(groups, decoder):
    torch.manual_seed(len(groups))
    num_tokens = sum(group.size for group in groups)
    ids = torch.randint(0, 4000, (num_tokens,), device="cuda")
    grad = torch.randn(num_tokens, decoder.config.hidden_size, device="cuda", dtype=torch.bfloat16)
    return ids, grad


def trained(model, groups):
    """Hidden states; gradients are added to what there is."""
    decoder = backbone(model)
    ids, grad = row_of(groups, decoder)
    layout = AttentionLayout(groups, "cuda")
    positions = layout.positions.long()
    out = decoder(input_ids=ids[None], position_ids=positions[None], packed_layout=layout).last_hidden_state[0]
    out.backward(grad)
    return out.detach()


def padded_by_hand(model, groups):
    """The same without a graph: the row padded, and tables with lines of no token."""
    decoder = backbone(model)
    ids, grad = row_of(groups, decoder)
    rows = rounded_rows(len(ids))
    layout = AttentionLayout(groups, "cpu", rows)
    forms = decoder.row_invariant.graphs._forms
    tables = HostTables.of(layout, forms, torch.bfloat16, torch.device("cuda"))
    padded = PaddedLayout(tables, "cuda")
    padded.load(tables)
    hidden = embedded(decoder.embed_tokens, ids)
    wider = torch.cat([hidden, hidden.new_zeros(rows - len(ids), hidden.shape[1])])
    tables_of_positions = decoder.row_invariant.reach(layout.longest)
    out = decoder.run_layers(wider, PackedRows(padded, padded.position, tables_of_positions))
    out[: len(ids)].backward(grad)
    return out[: len(ids)].detach()


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", [name for name in COVERED if name not in (*MIXTURES, *HYBRIDS)])
def test_hidden_states_are_those_of_the_layers_and_gradients_those_of_the_padded_row(family, lora, sums):
    if lora and sums:
        pytest.skip("factors are float32 already")
    model, plain = installed(family, lora=lora, sums=sums), installed(family, lora=lora, sums=sums)
    eager = installed(family, lora=lora, sums=sums, graphs=False)
    for step in range(2):
        for groups in (GROUPS, OTHERS, GROUPS, TREE, MANY):
            out = trained(model, groups)
            assert torch.equal(out, padded_by_hand(plain, groups))
            assert torch.equal(out, trained(eager, groups))
        ours, theirs, exact = gradients(model), gradients(plain), gradients(eager)
        assert ours.keys() == theirs.keys() == exact.keys()
        for name, gradient in ours.items():
            assert torch.equal(gradient, theirs[name]), (step, name)
            error = (gradient.double() - exact[name].double()).norm() / exact[name].double().norm()
            assert error < 0.02, (name, error)
        for each in (model, plain, eager):
            each.zero_grad(set_to_none=True)
    assert len(backbone(model).row_invariant.graphs) == 3


def test_a_row_without_a_graph_adds_to_the_same_gradients(monkeypatch):
    model, plain = installed("qwen3", sums=True), installed("qwen3", sums=True)
    for limit in (layer_graphs.MOST_WORK, 0, layer_graphs.MOST_WORK):
        monkeypatch.setattr(layer_graphs, "MOST_WORK", limit)
        trained(model, GROUPS)
        (padded_by_hand if limit else trained)(plain, GROUPS)
    ours, theirs = gradients(model), gradients(plain)
    assert all(torch.equal(gradient, theirs[name]) for name, gradient in ours.items())


def test_a_second_row_before_the_first_ones_backward_has_its_own_activations():
    model, plain = installed("llama-rope-scaled"), installed("llama-rope-scaled")
    decoder = backbone(model)
    graphs = decoder.row_invariant.graphs

    def forward(groups):
        ids, grad = row_of(groups, decoder)
        layout = AttentionLayout(groups, "cuda")
        positions = layout.positions.long()[None]
        out = decoder(input_ids=ids[None], position_ids=positions, packed_layout=layout).last_hidden_state[0]
        return out, grad

    (first, grad), (second, other) = forward(GROUPS), forward(OTHERS)
    assert len(graphs) == 1
    second.backward(other)
    first.backward(grad)
    trained(plain, OTHERS)
    trained(plain, GROUPS)
    ours, theirs = gradients(model), gradients(plain)
    for name, gradient in ours.items():
        assert (gradient.float() - theirs[name].float()).norm() < 0.02 * theirs[name].float().norm(), name
    del first, second
    trained(model, MANY)
    assert len(graphs) == 2


def test_weights_at_other_addresses_make_other_graphs():
    model = installed("qwen2")
    trained(model, GROUPS)
    before = copy.copy(backbone(model).row_invariant.graphs._graphs)
    model.zero_grad(set_to_none=True)
    norm = backbone(model).norm
    norm.weight.data = norm.weight.data * 2
    out = trained(model, GROUPS)
    assert list(before.values()) != list(backbone(model).row_invariant.graphs._graphs.values())
    backbone(model).row_invariant.graphs = None
    assert torch.equal(out, trained(model, GROUPS))


def test_layers_that_are_run_again_use_no_graph():
    model = installed("qwen3").train()
    for layer in backbone(model).layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = lambda run, *args: run(*args)
    trained(model, GROUPS)
    assert len(backbone(model).row_invariant.graphs) == 0


def test_a_size_is_captured_after_another_pass_of_the_step_and_not_while_one_is_held():
    model = installed("qwen3", sums=True)
    decoder, graphs = backbone(model), backbone(model).row_invariant.graphs

    def forward(groups):
        ids, grad = row_of(groups, decoder)
        layout = AttentionLayout(groups, "cuda")
        positions = layout.positions.long()[None]
        return decoder(input_ids=ids[None], position_ids=positions, packed_layout=layout).last_hidden_state[0], grad

    held, grad = forward(GROUPS)
    held.backward(grad)
    trained(model, TREE)  # whose size is new
    assert len(graphs) == 2, "a graph's pass leads to no parameter"
    decoder.row_invariant.graphs = None
    held, grad = forward(GROUPS)
    decoder.row_invariant.graphs = graphs
    held.backward(grad)
    trained(model, MANY)
    assert len(graphs) == 2
    del held
    trained(model, MANY)
    assert len(graphs) == 3
