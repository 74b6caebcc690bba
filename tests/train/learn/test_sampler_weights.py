"""The weights that sampled a step's tokens: each token is centred under its own, and the gradient is the formula's."""

from dataclasses import replace

import pytest
import torch

from logitless.errors import TrainingError
from logitless.models.lm_head import causal_lm
from logitless.objective.objective import Objective
from logitless.objective.surrogate import Reinforce
from logitless.objective.weighting import SequenceMean
from logitless.train.learn.sampler_weights import SamplerWeights
from logitless.train.learn.step import MicroBatch, backward, step_numbers
from tests.train.learn.test_step import CUTS, ROWS, TEMPERATURE, WHOLE, _assert_same, _block, _parts, _policy
from tests.train.learn.test_teacher import _adapted

VERSION, SINCE = 9, 1
"""Of the policy, and steps since the block was packed."""

CENTRED = Objective(surrogate=Reinforce(), score_centering=True)


def moved(policy, generator):
    """Change the trained weights as a step does, but further."""
    with torch.no_grad():
        for parameter in (p for p in policy.model.parameters() if p.requires_grad):
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def logits_of(policy, batch):
    """[N, V] of the batch's targets, each sequence read alone through all logits."""
    rows, inputs, start = [], batch.inputs, 0
    sources = inputs.source.split(inputs.source_counts)
    for length, source in zip(inputs.lengths, sources, strict=True):
        if len(source):
            logits = causal_lm(policy.model)(inputs.input_ids[None, start : start + length]).logits[0]
            rows.append(logits[source - start])
        start += length
    return torch.cat(rows) / TEMPERATURE


def aged(policy, *, place="device", most=3):
    """A block whose tokens are 1 to 3 steps old, mixed in each sequence, what holds their weights, and all q [N, V]."""
    generator = torch.Generator().manual_seed(1)
    block = _block(policy)
    behind = torch.randint(0, 4, (block.packed.num_tokens,), generator=generator)
    held, of_version = SamplerWeights(policy, place=place, most=most), {}
    for version in range(VERSION - 3, VERSION):
        held.hold(version)
        of_version[version] = logits_of(policy, block.packed).detach().softmax(1)
        moved(policy, generator)
    of_version[VERSION] = logits_of(policy, block.packed).detach().softmax(1)
    q = torch.stack([of_version[VERSION - int(steps)][t] for t, steps in enumerate(behind)])
    return MicroBatch(replace(block.packed, lag=behind - SINCE), block.tokens), held, q


def gradient_of(policy, held, block, plan):
    """Loss and gradient of a step, and its outputs."""
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.grad = None
    options = {"temperature": TEMPERATURE, "backend": "chunked"}

    def centering(batch):
        return held.centering(batch, version=VERSION, since=SINCE, **options)

    parts = _parts(block, plan, CENTRED, SequenceMean())
    with held.in_use():
        outputs = backward(policy, CENTRED, parts, **options, seed=0, centering=centering)
    return sum(output.loss.detach() for output in outputs), torch.cat([p.grad.flatten() for p in parameters]), outputs


@pytest.mark.parametrize(("made", "place"), [(_policy, "device"), (_adapted, "host")])
def test_every_cut_of_a_step_with_tokens_of_four_versions_has_the_gradient_of_full_logits(made, place):
    policy = made()
    block, held, q = aged(policy, place=place)
    log_p = logits_of(policy, block.packed).log_softmax(1)
    [part] = _parts(block, WHOLE, CENTRED, SequenceMean())
    at = block.packed.tokens_of(ROWS)
    centering = ((q - log_p.detach().exp()) * log_p).sum(1)[at]
    logp = log_p[at, block.packed.target[at]]
    weighed = part.tokens.token_weight * part.tokens.advantage
    loss = (weighed * (centering - logp)).sum()
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)])
    plain = torch.autograd.grad(-(weighed * logp).sum(), parameters)
    assert (wanted - torch.cat([g.flatten() for g in plain])).abs().max() > 0.01 * wanted.abs().max()
    for plan in (WHOLE, *CUTS.values()):
        found = gradient_of(policy, held, block, plan)
        _assert_same(found, (loss.detach(), wanted), 1e-12)
        kl = (q * (q.log() - log_p.detach())).sum(1)[at].mean()
        assert step_numbers(found[2])["kl_sampler/mean"].item() == pytest.approx(kl.item(), rel=1e-10)


def test_tokens_of_the_policys_own_weights_are_read_once_and_change_nothing_in_any_bit():
    policy = _policy()
    block, held, _ = aged(policy)
    block = MicroBatch(replace(block.packed, lag=torch.full_like(block.packed.lag, -SINCE)), block.tokens)
    held.load({})  # nothing is read, and so nothing needs to be there
    loss, gradient, outputs = gradient_of(policy, held, block, WHOLE)
    plain = replace(CENTRED, score_centering=False)
    for parameter in policy.model.parameters():
        parameter.grad = None
    parts = _parts(block, WHOLE, plain, SequenceMean())
    [output] = backward(policy, plain, parts, temperature=TEMPERATURE, backend="chunked", seed=0)
    assert torch.equal(loss, output.loss)
    assert torch.equal(gradient, torch.cat([p.grad.flatten() for p in policy.model.parameters()]))
    assert not outputs[0].kl_sampler.any()


def test_of_an_adapter_nothing_else_is_held_and_what_is_stored_is_held_again():
    policy = _adapted()
    block, held, _ = aged(policy)
    names = {name.split("/", 2)[2] for name in held.tensors()}
    assert names == {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert all("lora" in name for name in names)
    found = gradient_of(policy, held, block, WHOLE)
    again = SamplerWeights(policy, place="host", most=3)
    again.load({**held.tensors(), "parameter/x": torch.zeros(1)})
    assert again.versions == held.versions == (6, 7, 8)
    for one, other in zip(found[:2], gradient_of(policy, again, block, WHOLE)[:2], strict=True):
        assert torch.equal(one, other)


def test_the_newest_are_held_and_weights_that_are_gone_are_named():
    policy = _policy()
    assert [aged(policy, most=most)[1].versions for most in (1, 2, 3, 4, 9)] == [(8,), (7, 8), *[(6, 7, 8)] * 3]
    block, held, _ = aged(policy, most=2)
    with pytest.raises(TrainingError, match=r"version 6, .*given the versions 7, 8\. Go on with the rollout.staleness"):
        gradient_of(policy, held, block, WHOLE)
