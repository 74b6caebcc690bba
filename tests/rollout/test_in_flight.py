"""Weights that arrive while completions are under way, on the CPU, and their repetition."""

import pytest
import torch

from logitless.errors import TrainingError, UnavailableError
from logitless.rollout.engine import Weights
from logitless.rollout.in_flight import DrawnVersions, RepeatingEngine
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.transformers import TransformersEngine
from tests.models.tiny import tiny
from tests.rollout.arriving import Versions, in_flight
from tests.rollout.engines import StandIn
from tests.rollout.plain_forward import logp_alone
from tests.rollout.test_transformers import prompts, tokenizer

ASKED = prompts(3, 9, 1)
ARRIVE = {3: 1, 9: 4}
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "top_p": 0.9, "min_new_tokens": 3}


def engine_of(model, **options):
    return TransformersEngine(model, tokenizer(), **options)


def differences(versions, groups, options):
    """How far each log-prob is from that of a plain forward over all tokens, with the weights that drew it."""
    found = []
    for version in (0, 1, 4):
        versions.put(version)
        for prompt, group in zip(ASKED, groups, strict=True):
            for each in group:
                of = torch.tensor([v == version for v in versions_of(each)])
                expected = logp_alone(versions.model, prompt, each, options, ends=[2])
                found += (torch.tensor(each.logp_sampler) - expected)[of].abs().tolist()
    return torch.tensor(found)


def versions_of(completion):
    return completion.length * [completion.weights_version] if (v := completion.token_versions) is None else v.tolist()


@pytest.mark.parametrize("settings", [{}, PENALTIES], ids=["plain", "penalties"])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "gpt2"])
def test_recomputed_keys_give_the_log_probs_of_the_version_that_drew_a_token_and_kept_ones_do_not(name, settings):
    versions, options = Versions(tiny(name)), SamplingOptions(max_new_tokens=12, **settings)
    for recompute in (True, False):
        engine = engine_of(versions.model, prefill_tokens=30)
        groups = in_flight(engine, versions, ARRIVE, ASKED, 3, options, seed=1, recompute=recompute)
        drawn = {tuple(versions_of(each)) for group in groups for each in group}
        assert (0, 0, 0, 1, 1, 1, 1, 1, 1, 4, 4, 4) in drawn
        largest = float(differences(versions, groups, options).max())
        assert (largest < 1e-3) == recompute, largest


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("max_rows", [512, 4])
def test_a_record_of_versions_draws_the_same_again(recompute, max_rows):
    versions, options = Versions(tiny("llama")), SamplingOptions(max_new_tokens=12)
    engine = engine_of(versions.model, max_rows=max_rows)
    groups = in_flight(engine, versions, {3: 1, 20: 4}, ASKED, 3, options, seed=1, recompute=recompute)
    assert len({v for group in groups for each in group for v in versions_of(each)}) > 1
    drawn = DrawnVersions()
    drawn.add(groups)
    again = RepeatingEngine(engine, recompute=recompute, copies=4)
    for version in (0, 1, 4, 5):
        versions.put(version)
        again.load(Weights.of(versions.model), version)
    newest = {name: p.detach().clone() for name, p in versions.model.named_parameters()}
    again.repeat(DrawnVersions(drawn.calls))
    assert again.sample(ASKED, 3, options, seed=1) == groups
    assert all(torch.equal(p, newest[name]) for name, p in versions.model.named_parameters())
    more = again.sample(ASKED, 3, options, seed=1)  # than was recorded, as by a run that differs: the newest draw it
    assert {v for group in more for each in group for v in versions_of(each)} == {5}


def test_a_version_that_is_gone_is_named():
    versions, options = Versions(tiny("llama")), SamplingOptions(max_new_tokens=4)
    groups = in_flight(
        engine := engine_of(versions.model), versions, {1: 1}, ASKED, 1, options, seed=1, recompute=False
    )
    drawn = DrawnVersions()
    drawn.add(groups)
    again = RepeatingEngine(engine, recompute=False, copies=1)
    for version in (0, 1):
        again.load(Weights.of(versions.model), version)
    again.repeat(drawn)
    with pytest.raises(TrainingError, match="tokens by version 0 of the weights; given the versions 1"):
        again.sample(ASKED, 1, options, seed=1)


def test_an_engine_that_takes_no_weights_between_steps_is_refused_by_name():
    with pytest.raises(UnavailableError, match=r"takes weights between two decoding steps.*; given StandIn"):
        RepeatingEngine(StandIn(), recompute=True, copies=2)
