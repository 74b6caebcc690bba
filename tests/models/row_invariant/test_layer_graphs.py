"""Padded layouts: tables and rows of no token change nothing."""

from random import Random

import pytest
import torch

from logitless.models.attention import AttentionLayout
from logitless.models.row_invariant import layer_graphs
from logitless.models.row_invariant.layer_graphs import (
    HostTables,
    PaddedLayout,
    _in_a_graph,
    rounded_lines,
    rounded_parts,
    rounded_rows,
)
from logitless.models.row_invariant.layers import PackedRows, install_row_invariant
from logitless.types import PromptGroup
from tests.models.row_invariant.test_layers import small

pytest.importorskip("triton")
GROUPS = [PromptGroup(9, (5, 3)), PromptGroup(3), PromptGroup(2, (1, 1, 2))]
OTHERS = [PromptGroup(2, (3, 4)), PromptGroup(8, (9,))]
TREE = [PromptGroup(3, (PromptGroup(2, (3, 1)), PromptGroup(4, (2, 2))))]
OTHER_TREE = [PromptGroup(2, (PromptGroup(1, (2, 2)), PromptGroup(6, (5, 1)))), PromptGroup(4)]
ROWS = 32


def installed(name):
    model = small(name)
    install_row_invariant(model)
    return model.model


def tables_of(decoder, groups, rows=ROWS):
    forms = list(dict.fromkeys(layer.row_invariant_form for layer in decoder.layers))
    return HostTables.of(AttentionLayout(groups, "cpu", rows), forms, torch.float32, torch.device("cpu"))


def hidden_and_gradients(decoder, layout, position, hidden, grad):
    hidden = hidden.clone().requires_grad_()
    tables = decoder.row_invariant.reach(256)
    out = decoder.run_layers(hidden, PackedRows(layout, position, tables))
    decoder.zero_grad()
    out.backward(grad)
    return out.detach(), hidden.grad, {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("name", "rows_of"),
    [
        pytest.param("qwen3", (GROUPS, OTHERS), marks=pytest.mark.slow),
        ("gpt_oss", (GROUPS, OTHERS)),
        pytest.param("gemma3", (TREE, OTHER_TREE), marks=pytest.mark.slow),
    ],
)
def test_a_padded_row_has_the_bits_of_the_row_and_its_gradients(name, rows_of, monkeypatch):
    for name_of_least in ("_LEAST_LINES", "_LEAST_PARTS"):  # the interpreter takes its time for empty lines too
        monkeypatch.setattr(layer_graphs, name_of_least, 32)
    decoder = installed(name)
    padded = PaddedLayout(tables_of(decoder, rows_of[0]), "cpu")
    for groups in rows_of:  # the second finds what the first left
        padded.load(tables_of(decoder, groups))
        plain = AttentionLayout(groups)
        rows = plain.num_tokens
        hidden, grad = torch.randn(2, rows, decoder.config.hidden_size)
        ours = hidden_and_gradients(decoder, plain, plain.positions.long(), hidden, grad)
        room = torch.zeros(ROWS - rows, decoder.config.hidden_size)
        wide = [torch.cat([each, room]) for each in (hidden, grad)]
        found = hidden_and_gradients(decoder, padded, padded.position, *wide)
        assert torch.equal(found[0][:rows], ours[0])
        assert torch.equal(found[1][:rows], ours[1])
        assert not found[1][rows:].any()
        for parameter, gradient in ours[2].items():
            torch.testing.assert_close(found[2][parameter], gradient, rtol=1e-4, atol=1e-5)


def test_rows_alike_are_of_one_size():
    decoder = installed("qwen2")
    sizes = {tables_of(decoder, groups).size for groups in (GROUPS, OTHERS)}
    assert len(sizes) == 1
    assert tables_of(decoder, TREE).size not in sizes
    many, few = ([PromptGroup(length)] * (300 // length) for length in (1, 30))
    assert tables_of(decoder, many, 512).size != tables_of(decoder, few, 512).size


def test_rows_are_padded_by_less_than_a_half_and_long_ones_by_a_quarter_and_tables_to_less_than_four_times():
    for n in range(513, 20_000):
        assert n <= rounded_rows(n) < (1.5 if n <= 2048 else 1.25) * n
        assert n <= rounded_lines(n, 256) < 4 * n
        assert n <= rounded_parts(n) < 2 * n


def test_training_on_groups_of_any_number_and_length_needs_few_graphs():
    decoder = installed("qwen2")
    random = Random(0)
    sizes = set()
    for count in range(1, 33):
        for _ in range(3):
            trees = [
                PromptGroup(random.randint(10, 40), tuple(random.randint(1, 6) for _ in range(random.randint(2, 16))))
                for _ in range(count)
            ]
            groups = [PromptGroup(30, tuple(trees))] if count > 1 else trees
            rows = rounded_rows(sum(group.size for group in groups))
            sizes.add(tables_of(decoder, groups, rows).size)
    assert len(sizes) <= 12


def test_keys_without_a_line_belong_to_no_part_and_queries_without_one_are_of_no_token():
    decoder = installed("qwen2")
    tables = tables_of(decoder, OTHERS)
    padded = PaddedLayout(tables, "cpu")
    padded.load(tables)
    for name, table in tables.tables.items():
        if name[0] == "key":
            lines, length = padded.key_tiles(*name[1:])[0], len(table[0])
            assert (lines[length:, 4] == -1).all()
        else:
            lines, length = padded.query_tiles(*name[1:]), len(table)
            assert not lines[length:].any()
        assert length < len(lines)


def test_a_parameter_is_in_a_graph_until_the_pass_that_leads_to_it_is_freed():
    weight = torch.nn.Parameter(torch.ones(2))
    assert not _in_a_graph(weight)
    loss = (2 * weight).sum()
    loss.backward()
    assert _in_a_graph(weight)
    del loss
    assert not _in_a_graph(weight)
