"""Parity with verl: its numbers, of the committed file, are this library's."""

import json

import pytest
import torch

import verl_parity
from script import RESULTS
from verl_parity import OPTIONS

RUNS = {run["name"]: run for run in json.loads((RESULTS / verl_parity.RESULT).read_text())["runs"]}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.name)
def test_an_option_of_verls_distillation_gives_its_loss_and_gradient(options):
    of_verl = verl_parity.of_json(RUNS[options.name]["verl"])
    assert of_verl.gradients[0].norm() > 0
    assert verl_parity.compared(options, of_verl).ok


def test_every_committed_number_is_compared():
    assert [options.name for options in OPTIONS] == list(RUNS)
    assert all(run["ok"] for run in RUNS.values())


def test_another_teacher_is_found(monkeypatch):
    class Other(verl_parity.Streams):
        def __post_init__(self):
            super().__post_init__()
            self.teacher_hidden = self.teacher_hidden + 1e-3

    monkeypatch.setattr(verl_parity, "Streams", Other)
    assert not any(verl_parity.compared(each, verl_parity.of_json(RUNS[each.name]["verl"])).ok for each in OPTIONS)


def test_the_ratio_is_clipped_where_it_is_not_1():
    streams = verl_parity.Streams()
    [options] = [each for each in OPTIONS if each.policy_gradient and each.weighting == "seq-mean-token-sum"]
    ratio = (streams.logp[0] - streams.logp_old(options)).detach().exp()
    assert bool((ratio > 1.2).any())
    assert bool((ratio < 0.8).any())
    [first] = [each for each in OPTIONS if each.first_step]
    assert torch.equal(streams.logp_old(first), streams.logp[0].detach())
