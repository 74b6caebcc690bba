"""Laws of every composition: partition, permutation, hidden rows, the first step, precision."""

from dataclasses import fields, replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.objective.batches import random_batch
from tests.objective.compositions import composed, options_of, parts

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=6).map(tuple)
SEEDS = st.integers(0, 2**16)
LAW = settings(max_examples=50, deadline=None)


def evaluate(objective, logp, entropy, batch, statistics):
    """Loss and gradients to logp and entropy, taken the way a trainer does."""
    logp, entropy = logp.detach().requires_grad_(), entropy.detach().requires_grad_()
    output = objective(logp, entropy, batch, block=statistics, **options_of(objective))
    output.loss.backward()
    return output.loss.detach(), logp.grad, entropy.grad


def case(objective, lengths, seed):
    logp, entropy, batch = random_batch(lengths, seed)
    return logp, entropy, batch, objective.block_statistics(batch, generator=torch.Generator().manual_seed(seed))


def tokens_of(batch, sequences):
    return torch.cat([torch.nonzero(batch.sequence == s)[:, 0] for s in sequences])


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@LAW
@given(chosen=parts(), lengths=LENGTHS, seed=SEEDS, data=st.data())
def test_no_partition_into_micro_batches_changes_loss_or_gradient(chosen, lengths, seed, data):
    objective = composed(chosen)
    logp, entropy, batch, statistics = case(objective, lengths, seed)
    whole = evaluate(objective, logp, entropy, batch, statistics)
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=3)))
    total = torch.zeros((), dtype=torch.float64)
    gradients = torch.full((2, batch.num_tokens), torch.nan, dtype=torch.float64)
    for start, end in zip([0, *cuts], [*cuts, len(lengths)], strict=True):
        if start == end:
            continue
        part = list(order[start:end])
        tokens = tokens_of(batch, part)
        loss, *grads = evaluate(objective, logp[tokens], entropy[tokens], batch.take(part), statistics)
        total += loss
        gradients[:, tokens] = torch.stack(grads)
    assert_same(total, whole[0])
    assert_same(gradients, torch.stack(whole[1:]))


@LAW
@given(chosen=parts(), lengths=LENGTHS, seed=SEEDS, data=st.data())
def test_rows_of_weight_zero_change_nothing_whatever_they_hold(chosen, lengths, seed, data):
    objective = composed(chosen)
    logp, entropy, batch, _ = case(objective, lengths, seed)
    hidden = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=batch.num_tokens, max_size=batch.num_tokens)), dtype=torch.bool
    )
    batch = replace(batch, token_weight=torch.where(hidden, 0.0, batch.token_weight))
    shown = torch.nonzero(~hidden)[:, 0]
    vectors = {f.name: getattr(batch, f.name) for f in fields(batch) if isinstance(getattr(batch, f.name), Tensor)}
    without = replace(batch, **{name: value[shown] for name, value in vectors.items()})

    def run(logp, entropy, batch):
        statistics = objective.block_statistics(batch, generator=torch.Generator().manual_seed(seed))
        return evaluate(objective, logp, entropy, batch, statistics)

    loss, *grads = run(logp[shown], entropy[shown], without)
    for garbage in (torch.nan, torch.inf, -torch.inf, 1e30):
        spoiled = {
            name: torch.where(hidden, garbage, value)
            for name, value in vectors.items()
            if value.is_floating_point() and name != "token_weight"
        }
        found, *found_grads = run(
            torch.where(hidden, garbage, logp), torch.where(hidden, garbage, entropy), replace(batch, **spoiled)
        )
        assert_same(found, loss)
        for each, expected in zip(found_grads, grads, strict=True):
            assert_same(each[shown], expected)
            assert each[hidden].tolist() == [0.0] * int(hidden.sum())


@LAW
@given(chosen=parts(), lengths=LENGTHS, seed=SEEDS)
def test_the_ratio_is_exactly_one_and_nothing_is_clipped_on_the_first_step(chosen, lengths, seed):
    objective = composed(chosen)
    logp, entropy, batch, statistics = case(objective, lengths, seed)
    batch = replace(batch, logp_old=logp.detach().clone())
    output = objective(logp, entropy, batch, block=statistics, **options_of(objective))
    assert output.log_ratio.exp().tolist() == [1.0] * batch.num_tokens
    if output.clipped_low is not None:
        assert not (output.clipped_low | output.clipped_high).any()


@LAW
@given(chosen=parts(), lengths=LENGTHS, seed=SEEDS)
def test_the_loss_is_the_weighted_sum_less_the_bonus_and_its_gradient_is_the_reported_one(chosen, lengths, seed):
    objective = composed(chosen)
    logp, entropy, batch, statistics = case(objective, lengths, seed)
    output = objective(logp, entropy, batch, block=statistics, **options_of(objective))
    output.loss.backward()
    assert torch.equal(output.grad_logp, logp.grad)
    assert not output.token_loss.requires_grad
    expected = (batch.token_weight * output.token_loss).sum()
    if objective.entropy_bonus is not None:
        coefficient = options_of(objective).get("entropy_coefficient", objective.entropy_bonus.coefficient)
        expected = expected - coefficient * output.entropy_bonus
    assert_same(output.loss, expected.detach())


@settings(max_examples=25, deadline=None)
@given(chosen=parts(), lengths=LENGTHS, seed=SEEDS)
def test_float32_stays_near_float64(chosen, lengths, seed):
    objective = composed(chosen)
    # A threshold (clip, filter, mask) may fall between the two precisions: then the case proves nothing.
    logp, entropy, batch, statistics = case(objective, lengths, seed)
    exact = objective(logp, entropy, batch, block=statistics, **options_of(objective))
    _, _, single = random_batch(lengths, seed, dtype=torch.float32)
    single = replace(single, selected=batch.selected)
    narrow_statistics = objective.block_statistics(single, generator=torch.Generator().manual_seed(seed))
    found = objective(logp.float(), entropy.float(), single, block=narrow_statistics, **options_of(objective))
    same_side = torch.equal(found.grad_logp == 0, exact.grad_logp == 0)
    if same_side and all(torch.equal(found.dropped[name], exact.dropped[name]) for name in exact.dropped):
        scale = exact.token_loss.abs().max().item() if batch.num_tokens else 1.0
        torch.testing.assert_close(found.loss.double(), exact.loss, rtol=1e-4, atol=1e-4 * max(scale, 1.0))
