"""TRL's installed loss against ours: every row holds, every row could fail."""

from importlib import metadata

import pytest
import torch

import parity_trl
from logitless.bench.parity import FLOAT64, row
from logitless.errors import UnavailableError


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
