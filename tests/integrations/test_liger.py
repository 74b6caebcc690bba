"""The module against Liger's own, and against numbers worked by hand."""

import math
import re

import pytest
import torch

from logitless.bench.parity_liger import CASES, against_liger
from logitless.errors import ConfigurationError, InputError
from logitless.integrations.liger import LigerFusedLinearGRPOLoss
from tests.rounding import of_sum

B, T, D, V = 3, 4, 6, 11


@pytest.fixture
def call():
    generator = torch.Generator().manual_seed(3)
    return {
        "_input": torch.randn(B, T, D, generator=generator),
        "lin_weight": torch.randn(V, D, generator=generator),
        "selected_token_ids": torch.randint(V, (B, T), generator=generator),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]),
        "advantages": torch.tensor([1.0, -2.0, 0.5]),
    }


def plain(**options):
    return LigerFusedLinearGRPOLoss(**{"beta": 0.0, "use_ref_model": False, **options})


def of_liger(call, **options):
    chunked_loss = pytest.importorskip("liger_kernel.chunked_loss")
    options = {"beta": 0.0, "use_ref_model": False, **options}
    return chunked_loss.LigerFusedLinearGRPOLoss(compiled=False, **options)(**call)


def test_every_option_agrees_with_liger():
    pytest.importorskip("liger_kernel")
    rows = list(against_liger(LigerFusedLinearGRPOLoss))
    assert len(rows) == len(CASES)
    assert [(row.name, row.loss_rel, row.grad_rel) for row in rows if not row.ok] == []


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"importance_sampling_level": level, **each}
            for level in ("token", "sequence")
            for each in ({}, {"beta": 0.3, "use_ref_model": True}, {"delta": 1.05}, {"delta": 1.5})
        ),
        {"loss_type": "cispo", "epsilon_high": 1.3},
    ],
)
def test_the_metrics_are_ligers(call, options):
    generator = torch.Generator().manual_seed(4)
    old = -2.5 + torch.randn(B, T, generator=generator)
    given = {**call, "old_per_token_logps": old, "ref_per_token_logps": old if "beta" in options else None}
    _, theirs = of_liger(given, **options)
    _, ours = plain(**options)(**given)
    assert [each.item() for each in ours] == pytest.approx([each.item() for each in theirs], rel=1e-5)
    assert theirs[-1] > 0


def test_at_ratio_one_the_loss_is_minus_the_mean_advantage(call):
    def rounding(absolute):
        """Of a sum of seven products with a weight that was rounded too, whose absolute values add up to this."""
        return of_sum(torch.float32, 7 + 2, absolute)

    # dapo: tokens 4, 2, 1 with advantages 1, -2, 0.5: -(4 - 4 + 0.5) / 7
    loss, metrics = plain()(**call)
    assert loss.item() == pytest.approx(-0.5 / 7, abs=rounding(8.5 / 7))
    assert [each.item() for each in metrics] == [0.0]
    # grpo: the mean over sequences, -(1 - 2 + 0.5) / 3
    assert plain(loss_type="grpo")(**call)[0].item() == pytest.approx(0.5 / 3, abs=rounding(3.5 / 3))
    # luspo: the sum over tokens by sequences, -(4 - 4 + 0.5) / 3
    assert plain(loss_type="luspo")(**call)[0].item() == pytest.approx(-0.5 / 3, abs=rounding(8.5 / 3))


def test_what_stands_at_padded_positions_reaches_nothing(call):
    loss = plain()(**call)[0]
    padded = call["attention_mask"] == 0
    call["_input"] = call["_input"].masked_fill(padded[..., None], math.nan).requires_grad_()
    call["selected_token_ids"] = call["selected_token_ids"].masked_fill(padded, -100)
    again = plain()(**call)[0]
    assert again.item() == loss.item()
    (gradient,) = torch.autograd.grad(again, call["_input"])
    assert (gradient[padded] == 0).all()
    assert gradient[~padded].isfinite().all()


def test_a_masked_sampler_ratio_drops_its_tokens(call):
    ratio = torch.ones(B, T)
    ratio[0] = 0.0
    # only -(-4 + 0.5) / 7 is left
    assert plain()(**call, vllm_is_ratio=ratio)[0].item() == pytest.approx(3.5 / 7)


def test_items_of_the_whole_step_divide_the_token_mean(call):
    rounding = of_sum(torch.float32, 7, 8.5 / 70)  # of 4 + 4 + 0.5 in size
    assert plain()(**call, num_items_in_batch=70)[0].item() == pytest.approx(-0.5 / 70, abs=rounding)


def test_the_named_backend_is_used(call):
    chunked, reference = (plain(backend=name)(**call)[0] for name in ("chunked", "reference"))
    assert chunked.item() == pytest.approx(reference.item(), rel=1e-6)


def test_a_ceiling_of_cispo_below_one_warns_and_is_ligers():
    with pytest.warns(UserWarning, match="epsilon_high for the ceiling itself: 0.2") as warned:
        assert plain(loss_type="cispo").algorithm.objective.surrogate.ratio_max == 0.2
    assert [warning.filename for warning in warned] == [__file__]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"beta": 0.1, "use_ref_model": False}, InputError, "Liger's KL is 0"),
        ({"loss_type": "dr_grpo"}, InputError, "max_completion_length"),
        ({"loss_type": "dappo"}, ConfigurationError, "mean 'dapo'"),
    ],
)
def test_what_liger_would_answer_in_silence_is_an_error(options, error, message):
    with pytest.raises(error, match=message):
        plain(**options)


def test_a_kl_without_a_reference_is_an_error(call):
    with pytest.raises(InputError, match="ref_input and ref_weight"):
        LigerFusedLinearGRPOLoss(beta=0.1)(**call)


def test_vespo_takes_no_ratio_of_whole_sequences(call):
    with pytest.raises(InputError, match="vespo"):
        plain(loss_type="vespo")(**call, vllm_is_ratio=torch.ones(B, 1))


@pytest.mark.parametrize("num_sequences", [T, B])
def test_a_sampler_ratio_of_one_number_a_sequence_is_ligers(call, num_sequences):
    square = {name: torch.cat([each, each])[:num_sequences] for name, each in call.items() if name != "lin_weight"}
    given = {**square, "lin_weight": call["lin_weight"], "vllm_is_ratio": torch.tensor([0.5, 2.0, 0.1, 3.0])}
    given["vllm_is_ratio"] = given["vllm_is_ratio"][:num_sequences]
    assert plain()(**given)[0].item() == pytest.approx(of_liger(given)[0].item(), rel=1e-5)


@pytest.mark.parametrize("shape", [(T,), (B, T + 1), (1, T), (B, T, 1), ()])
def test_a_sampler_ratio_of_another_shape_is_an_error(call, shape):
    needed = r"needed vllm_is_ratio of \(3, 4\), \(3, 1\) or \(3,\)"
    with pytest.raises(InputError, match=f"{needed}; given shape {re.escape(str(shape))}"):
        plain()(**call, vllm_is_ratio=torch.ones(shape))


@pytest.mark.parametrize("num_items", [13.5, 2.25, torch.tensor(13.5), torch.tensor(7), 0.5, 0])
def test_items_that_are_no_whole_number_or_fewer_than_the_calls_divide_as_in_liger(call, num_items):
    given = {**call, "num_items_in_batch": num_items}
    assert plain()(**given)[0].item() == pytest.approx(of_liger(given)[0].item(), rel=1e-5)
