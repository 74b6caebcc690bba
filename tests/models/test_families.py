"""The law that decides whether an architecture trains: a packed row is its sequences, each run alone by transformers.

Values and gradients in float64, with prompts repeated and shared, with LoRA, recomputed, and cut into micro-batches.
"""

import copy
import functools
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from logitless.data.packing import pack, share_prompts
from logitless.errors import UnavailableError
from logitless.models.lm_head import backbone_hidden, lm_head, why_unshared
from logitless.models.loading import disable_dropout, load_model
from logitless.models.lora import LoraOptions, add_lora
from logitless.models.row_invariant.coverage import uncovered
from logitless.types import Completion, PackedInputs, Prompt, SharedInputs
from tests.models.families import REFUSED, TRAINED, Family, one_of_each_kind
from tests.models.in_float64 import in_float64, recomputed_in_float64

GROUPS = ((4, (3, 1, 7)), (1, (1, 4)))  # tokens of prompts and completions: sequences of 6, 4, 10, 1 and 4 tokens
CUTS = ([[0, 1, 2, 3, 4]], [[0], [1, 2, 3, 4]], [[3, 1], [4], [2, 0]])
TOLERANCE = 1e-11
"""Of the largest number. Sums of a few hundred terms in float64 through two layers differ by some 1e-14 of it."""


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with in_float64():
        yield


def inputs() -> PackedInputs:
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 40, (count,), generator=generator).tolist())

    pairs = []
    for name, (length, completions) in enumerate(GROUPS):
        prompt = Prompt(str(name), "", ids(length))
        pairs += [(prompt, Completion(prompt.id, ids(each), "", "stop")) for each in completions]
    return pack(pairs).inputs


def shaken(model: nn.Module) -> nn.Module:
    """Without dropout, and with no weight or bias left at 0 or 1, so that each does something of its own."""
    disable_dropout(model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("bias"):  # corrects a router's choices; begins at 0
                buffer.add_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model.double()


@functools.cache
def loaded(family: Family) -> nn.Module:
    options = {"dtype": torch.float64, "random_weights": True, "seed": 1}
    return shaken(load_model(family.config, attention=family.attention, **options))


def shared(family: Family, rows: PackedInputs) -> PackedInputs | SharedInputs:
    """With shared prompts, where its attention shares them."""
    return share_prompts(rows) if family.attention == "packed" else rows


@functools.cache
def plain(family: Family) -> nn.Module:
    """The same weights in transformers, which knows nothing of packing here."""
    fields = {name: value for name, value in family.config.items() if name != "model_type"}
    config = AutoConfig.for_model(family.model_type, **fields)
    options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float64}
    model = AutoModelForCausalLM.from_config(config, **options)
    model.load_state_dict(loaded(family).state_dict())
    disable_dropout(model)
    return model.double()


def logits(model: nn.Module, rows: PackedInputs | SharedInputs) -> Tensor:
    """Of the scored tokens, by our pass over the packed row and the formula of the head."""
    hidden = backbone_hidden(model, rows)[rows.source]
    head = lm_head(model)
    out = hidden @ head.weight.T if head.bias is None else hidden @ head.weight.T + head.bias
    out = head.scale * out
    return out if head.softcap is None else head.softcap * torch.tanh(out / head.softcap)


def logits_alone(model: nn.Module, rows: PackedInputs) -> Tensor:
    """The same by transformers' own pass over one sequence after the other, chosen tokens of each."""
    found, starts = [], [0, *torch.tensor(rows.lengths).cumsum(0).tolist()]
    sources = rows.source.split(list(rows.source_counts))
    for ids, start, source in zip(rows.input_ids.split(list(rows.lengths)), starts, sources, strict=False):
        found.append(model(input_ids=ids[None], use_cache=False).logits[0, source - start])
    return torch.cat(found)


def gradients(model: nn.Module, parts: Sequence[Tensor], weights: Sequence[Tensor]) -> dict[str, Tensor]:
    """Of the weighted sum of all logits; parameters that no token needs have none."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True))
    found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(named.items(), found, strict=True)}


def weight_of(values: Tensor) -> Tensor:
    return torch.randn(values.shape, generator=torch.Generator().manual_seed(3))


def check_equal(values: Tensor, found: dict[str, Tensor], expected: Tensor, truth: dict[str, Tensor]) -> None:
    assert (values - expected).abs().max() <= TOLERANCE * expected.abs().max()
    largest = max(each.abs().max() for each in truth.values())
    assert found.keys() == truth.keys()
    wrong = {name: (found[name] - g).abs().max() / largest for name, g in truth.items()}
    assert max(wrong.values()) <= TOLERANCE, sorted(wrong.items(), key=lambda item: -item[1])[:3]


@functools.cache
def truth_of(family: Family) -> tuple[Tensor, dict[str, Tensor]]:
    expected = logits_alone(plain(family), inputs())
    return expected.detach(), gradients(plain(family), [expected], [weight_of(expected)])


families = pytest.mark.parametrize("family", TRAINED, ids=lambda family: family.model_type)
kinds = pytest.mark.parametrize("family", one_of_each_kind(TRAINED))


@families
@pytest.mark.parametrize("shares", [False, True], ids=["repeated", "shared"])
def test_a_packed_row_is_its_sequences_run_alone_by_transformers_with_all_gradients(family, shares):
    model, rows = loaded(family), inputs()
    assert (why_unshared(model) is None) == (family.attention == "packed")
    given = shared(family, rows) if shares else rows
    values = logits(model, given)
    check_equal(values, gradients(model, [values], [weight_of(values)]), *truth_of(family))


@kinds
def test_micro_batches_cut_anywhere_add_up_to_the_gradient_of_the_whole(family):
    model, rows = loaded(family), inputs()
    expected, truth = truth_of(family)
    weights = weight_of(expected).split(list(rows.source_counts))
    per_sequence = expected.split(list(rows.source_counts))
    for cut in CUTS:
        parts = [logits(model, shared(family, rows.take(part))) for part in cut]
        found = gradients(model, parts, [torch.cat([weights[s] for s in part]) for part in cut])
        values = torch.cat(parts)
        check_equal(values, found, torch.cat([per_sequence[s] for part in cut for s in part]), truth)


@kinds
def test_recomputed_layers_give_the_same_gradients(family):
    model, rows = loaded(family), shared(family, inputs())
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": recomputed_in_float64})
    model.train()
    try:
        values = logits(model, rows)
        check_equal(values, gradients(model, [values], [weight_of(values)]), *truth_of(family))
    finally:
        model.eval().gradient_checkpointing_disable()


@kinds
def test_a_row_with_lora_on_linear_layers_and_experts_is_its_sequences_run_alone_with_it(family):
    rows = inputs()
    ours, theirs = (adapted(family, each) for each in (loaded, plain))
    theirs.load_state_dict(ours.state_dict())
    expected = logits_alone(theirs, rows)
    assert (expected - truth_of(family)[0]).abs().max() > 1e-3, "the adapters do something"
    truth = gradients(theirs, [expected], [weight_of(expected)])
    assert all("lora_" in name for name in truth)
    idle = [name.removesuffix("weight") for name, gradient in truth_of(family)[1].items() if not gradient.any()]
    assert all(g.any() or any(each in name for each in idle) for name, g in truth.items()), "every factor learns"
    assert any(".experts." in name for name in truth) == ("experts" in family.parts)
    for given in (rows, shared(family, rows)):
        values = logits(ours, given)
        check_equal(values, gradients(ours, [values], [weight_of(values)]), expected.detach(), truth)


def adapted(family: Family, make) -> nn.Module:
    """With adapters that do something, in float64; the cached model stays as it is."""
    return shaken(add_lora(copy.deepcopy(make(family)), LoraOptions(rank=2)))  # adapters are put into the model itself


@families
def test_exact_layers_and_the_gpu_engine_cover_what_the_table_says(family):
    with torch.device("meta"):
        model = load_model(family.config, device="meta", random_weights=True, attention=family.attention)
    assert (uncovered(model) == ()) == family.exact


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("family", REFUSED, ids=lambda family: family.model_type)
def test_an_architecture_that_cannot_hold_it_is_refused_with_the_reason(family, device):
    with pytest.raises(UnavailableError, match=family.refused):
        load_model(family.config, random_weights=True, device=device)
