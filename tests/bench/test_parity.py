"""The parity engine: every row holds, every row could fail."""

import collections
import contextlib
import dataclasses
import math
import warnings
from importlib import metadata
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from logitless.bench import parity, parity_distillation, parity_trl
from logitless.bench.parity import FLOAT32, FLOAT64, Measured, Row, against_reference, objectives, row
from logitless.errors import UnavailableError
from logitless.objective.advantage import AdvantageInputs
from logitless.objective.presets import PRESETS, algorithm
from logitless.objective.weighting import Totals
from logitless.types import TokenBatch


def test_differences_are_relative_to_token_losses_and_to_the_other_gradient():
    theirs = Measured((1.0, 2.0), (torch.tensor([3.0]), torch.tensor([[4.0]])))
    ours = Measured((1.0, 2.5), (torch.tensor([3.0]), torch.tensor([[5.0]])), scales=(1.0, 10.0))
    found = row("a", "trl", theirs, ours, 1e-9, "note")
    assert (found.loss_rel, found.grad_rel, found.note) == (0.05, 0.2, "note")


@pytest.mark.parametrize("bad", [math.nan, math.inf, 2e-9])
def test_a_row_is_not_ok_beyond_its_tolerance_or_without_a_number(bad):
    assert Row("a", "trl", 1e-9, 0.0, 1e-9).ok
    assert not Row("a", "trl", bad, 0.0, 1e-9).ok
    assert not Row("a", "trl", 0.0, bad, 1e-9).ok


def test_a_difference_where_nothing_should_be_is_infinite():
    zero = Measured((0.0,), (torch.zeros(2),))
    some = Measured((0.5,), (torch.ones(2),), scales=(0.0,))
    found = row("a", "trl", zero, some, 1e-9)
    assert (found.loss_rel, found.grad_rel) == (math.inf, math.inf)


def test_json_has_null_for_what_is_no_number():
    found = Row("a", "trl", math.nan, 0.0, 1e-9).as_json()
    assert found == {
        "name": "a",
        "against": "trl",
        "loss_rel": None,
        "grad_rel": 0.0,
        "tolerance": 1e-9,
        "ok": False,
        "note": "",
    }


# --- backends ---------------------------------------------------------------------------------------------------------


def test_every_preset_is_compared_on_every_backend(monkeypatch):
    monkeypatch.setattr(parity, "why_not", lambda backend, *_: None if backend == "chunked" else "not here")
    rows = list(against_reference())
    assert {each.against for each in rows} == {"chunked"}
    assert set(PRESETS) <= {each.name for each in rows}
    assert len(rows) == len(objectives()) + 6
    assert [each for each in rows if not each.ok] == []
    assert {each.tolerance for each in rows} == {FLOAT64}


def test_a_backend_without_float64_is_compared_in_float32(monkeypatch):
    dtypes = []

    def refuses_float64(backend, hidden, head):
        if backend == "fused":
            return "not here"
        dtypes.append(hidden.dtype)
        return "no float64" if hidden.dtype == torch.float64 else None

    monkeypatch.setattr(parity, "why_not", refuses_float64)
    rows = list(against_reference(quick=True))
    assert dtypes == [torch.float64, torch.float32]
    assert {(each.tolerance, each.ok) for each in rows} == {(FLOAT32, True)}


def test_a_wrong_head_is_found(monkeypatch):
    real = parity.token_scores

    def wrong(*args, backend, **more):
        scores = real(*args, backend="reference", **more)
        return dataclasses.replace(scores, logp=scores.logp * (1 + 1e-6)) if backend == "chunked" else scores

    monkeypatch.setattr(parity, "token_scores", wrong)
    monkeypatch.setattr(parity, "why_not", lambda backend, *_: None if backend == "chunked" else "not here")
    assert not any(each.ok for each in against_reference(quick=True))


# --- TRL --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trl_sides():
    """What TRL's code and ours gave for every case."""
    pytest.importorskip("trl")
    sides = {}
    for case in parity_trl.CASES:
        rollouts = parity_trl.Rollouts(case)
        sides[case.name] = (case, parity_trl.theirs(case, rollouts), parity_trl.ours(case, rollouts))
    return sides


def test_every_option_agrees_with_trls_code(trl_sides):
    assert len(trl_sides) == len(parity_trl.CASES) >= 40
    rows = [row(name, "trl", theirs, ours, FLOAT64) for name, (_, theirs, ours) in trl_sides.items()]
    assert [each for each in rows if not each.ok] == []


def test_every_loss_of_distillation_agrees_with_trls_code():
    pytest.importorskip("trl")
    rows = list(parity_distillation.distillation_rows())
    assert len(rows) == 17
    assert [each for each in rows if not each.ok] == []


def test_a2po_has_the_values_and_the_loss_of_trls_trainer(monkeypatch):
    pytest.importorskip("trl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that what is experimental may change
        from trl.experimental.a2po import a2po_trainer
    lengths, beta1, beta2 = (3, 1, 4), 0.4, 0.02
    of_reference = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 1.0], [0.5, 0.25, 1.0, 0.0]])
    monkeypatch.setattr(a2po_trainer, "unwrap_model_for_generation", lambda model, _: contextlib.nullcontext(model))
    monkeypatch.setattr(a2po_trainer, "gather_object", lambda each: each)
    monkeypatch.setattr(a2po_trainer, "logger", MagicMock())
    read = SimpleNamespace(to=lambda _: {"input_ids": torch.zeros(3, 1)})
    tokenizer = MagicMock(return_value=read, batch_decode=lambda ids, **_: [""] * len(ids))
    trainer = SimpleNamespace(
        args=SimpleNamespace(
            beta1=beta1,
            beta2=beta2,
            num_value_samples=4,
            per_device_train_batch_size=3,
            max_prompt_length=8,
            filter_all_incorrect=False,
        ),
        train_dataset=[{"prompt": name} for name in "abc"],
        eval_dataset=None,
        accelerator=SimpleNamespace(prepare=lambda each: each, device="cpu"),
        processing_class=tokenizer,
        ref_model=SimpleNamespace(generate=lambda **_: torch.zeros(12, 3)),
        value_generation_config=None,
        model=SimpleNamespace(training=True),
        _metrics={"train": collections.defaultdict(list)},
        _calculate_rewards=lambda *_, **__: of_reference.flatten(),
    )
    a2po_trainer.A2POTrainer._estimate_optimal_values(trainer)
    generator = torch.Generator().manual_seed(0)
    logp, logp_ref = -2 * torch.rand(2, sum(lengths), generator=generator, dtype=torch.float64)
    logp.requires_grad_()
    rewards = torch.tensor([1.0, 0.0, 0.5])
    trainer._get_sequence_logps = lambda *_: torch.stack([each.sum() for each in logp.split(lengths)])
    inputs = {
        **dict.fromkeys(("input_ids", "attention_mask", "logits_to_keep")),
        "ref_logps": torch.stack([each.sum() for each in logp_ref.split(lengths)]),
        "rewards": rewards,
        "v_star": torch.tensor([trainer._optimal_values[name] for name in "abc"]),
    }
    theirs = a2po_trainer.A2POTrainer.compute_loss(trainer, None, inputs)

    preset = algorithm("a2po", {"beta1": beta1, "beta2": beta2})
    sequence = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    columns = {"reference_rewards": of_reference.tolist()}
    advantage = preset.advantage(AdvantageInputs(rewards, torch.arange(3), sequence, columns=columns)).advantage
    weights = preset.weighting(lengths, Totals.of(lengths), None, torch.float64)
    batch = TokenBatch(sequence, 3, advantage.double(), weights, logp_ref=logp_ref)
    ours = preset.objective(logp, None, batch).loss
    sides = [Measured((each.item(),), torch.autograd.grad(each, logp), (each.item(),)) for each in (theirs, ours)]
    assert row("a2po", "trl", *sides, FLOAT32).ok  # its rewards and values are float32


def test_another_temperature_of_the_teacher_than_trls_is_found(monkeypatch):
    pytest.importorskip("trl")
    real = parity_distillation.token_divergence

    def other(*streams, **options):
        return real(*streams, **options, teacher_temperature=options["temperature"] + 1e-3)

    monkeypatch.setattr(parity_distillation, "token_divergence", other)
    assert not any(each.ok for each in parity_distillation.distillation_rows() if "beta" in each.name)


def test_every_case_has_a_gradient_and_its_option_changes_it(trl_sides):
    """A case whose option did nothing would compare the plain loss once more."""
    for name, (case, theirs, _) in trl_sides.items():
        assert theirs.gradients[0].norm() > 0, name
        fields = {key: case.fields[key] for key in ("loss_type", "epsilon_high") if key in case.fields}
        base = parity_trl.Case("base", fields, accumulation=case.accumulation, with_tools=case.with_tools)
        if name in SAME or case.fields == fields:
            continue
        plain = parity_trl.theirs(base, parity_trl.Rollouts(base))
        same = [torch.equal(a, b) for a, b in zip(theirs.gradients, plain.gradients, strict=True)]
        assert not all(same), name


SAME = {
    *(f"{loss}, token ratio" for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")),
    "vespo, sequence ratio",  # the level is ignored
    "sampler correction off",
    "scale_rewards=group",
}
"""Cases whose option is TRL's default, or does nothing."""


@pytest.mark.parametrize(
    "changed", [{"epsilon": 0.25}, {"importance_sampling_level": "sequence"}, {"scale_rewards": "batch"}, {"beta": 0.1}]
)
def test_another_configuration_than_trls_is_found(changed):
    pytest.importorskip("trl")
    case = parity_trl.Case("plain", {"loss_type": "grpo"})
    other = parity_trl.Case("other", {"loss_type": "grpo", **changed})
    rollouts = parity_trl.Rollouts(case)
    found = row("plain", "trl", parity_trl.theirs(case, rollouts), parity_trl.ours(other, rollouts), FLOAT64)
    assert max(found.loss_rel, found.grad_rel) > 1e-3
    assert not found.ok


@pytest.mark.parametrize("version", ["1.15.0", None])
def test_a_trl_too_old_or_absent_is_said(monkeypatch, version):
    def installed(package):
        if version is None:
            raise metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(parity_trl.metadata, "version", installed)
    with pytest.raises(UnavailableError, match=version or "none"):
        next(parity_trl.against_trl())


# --- Liger ------------------------------------------------------------------------------------------------------------
