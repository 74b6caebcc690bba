"""The laws of an optimizer step: how it is cut changes nothing, its first ratio is 1, its gradient is the formula's."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from logitless.data.packing import Packing, StepPlan, pack, plan_epoch
from logitless.errors import InputError
from logitless.models.loading import disable_dropout, load_model
from logitless.models.row_invariant.layer_graphs import _in_a_graph
from logitless.models.value_head import value_head_for
from logitless.objective.divergence import KLPenalty
from logitless.objective.entropy import EntropyBonus
from logitless.objective.filters import TopEntropy
from logitless.objective.objective import Objective
from logitless.objective.observations import Observations
from logitless.objective.presets import algorithm
from logitless.objective.surrogate import KlCov
from logitless.objective.value import ValueLoss
from logitless.objective.weighting import MicroBatchTokenMean, SequenceMean, TokenMean, TurnMean
from logitless.train.block import micro_batches_of
from logitless.train.learn.policy import Policy
from logitless.train.learn.score import scores_of
from logitless.train.learn.step import (
    MicroBatch,
    OptimizerStep,
    backward,
    on_host,
    step_numbers,
)
from logitless.types import Completion, Prompt, TokenBatch
from tests.train.tiny import TINY_GPT2, TINY_LLAMA

GPT2 = TINY_GPT2 | {"vocab_size": 23}
LLAMA = TINY_LLAMA | {"vocab_size": 23, "num_hidden_layers": 2, "initializer_range": 0.3}
PROMPT_LENGTHS = (3, 3, 3, 3, 7, 7, 7, 7)
COMPLETION_LENGTHS = (4, 1, 9, 5, 2, 0, 11, 6)  # one of them is empty
TEMPERATURE, BETA, BONUS = 0.7, 0.3, 0.05


def _policy(config=GPT2, dtype=torch.float64, **options) -> Policy:
    model = load_model(config, dtype=dtype, random_weights=True, seed=3)
    disable_dropout(model)
    return Policy(model.train(), **options)


ROWS = tuple(s for s in range(8) if s != 5)


def _scores(policy, batch, rows=(ROWS,), temperature=TEMPERATURE):
    return scores_of(policy, batch, list(rows), temperature=temperature, backend="chunked")


def _block(policy: Policy, dtype: torch.dtype = torch.float64) -> MicroBatch:
    """Two groups of four completions, scored by policies near the one that is trained."""
    generator = torch.Generator().manual_seed(5)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 23, (count,), generator=generator).tolist())

    prompts = {length: Prompt(str(length), "", ids(length)) for length in set(PROMPT_LENGTHS)}
    pairs = []
    for prompt_length, length in zip(PROMPT_LENGTHS, COMPLETION_LENGTHS, strict=True):
        prompt = prompts[prompt_length]
        pairs.append((prompt, Completion(prompt.id, ids(length), "", "stop")))
    batch = pack(pairs)
    scored = _scores(policy, batch, [(s,) for s in ROWS])

    def near(scale: float) -> torch.Tensor:
        return scored.logp.to(dtype) + scale * torch.randn(batch.num_tokens, generator=generator, dtype=dtype)

    advantage = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, 0.0, -1.5, 0.75], dtype=dtype)[batch.sequence]
    tokens = TokenBatch(
        batch.sequence,
        batch.num_sequences,
        advantage=advantage,
        token_weight=torch.ones_like(advantage),
        logp_old=near(0.2),
        logp_ref=near(0.5),
        entropy_old=scored.entropy,
        logp_sampler=batch.logp_sampler,
    )
    return MicroBatch(batch, tokens)


def _with(block: MicroBatch, **changes) -> MicroBatch:
    """The block with other numbers for its tokens."""
    return MicroBatch(block.packed, replace(block.tokens, **changes))


def _step(block, plan, objective, weighting, dropped=None, **options):
    dropped = dropped or [False] * block.packed.num_sequences
    return OptimizerStep(block.packed, block.tokens, plan, objective, weighting, dropped, **options)


def _parts(*step, places=None, scores_itself=False, **options):
    """The micro-batches of a step."""
    return _step(*step, **options).micro_batches(places, scores_itself=scores_itself)


def _gradient(policy, block, plan, objective, weighting, value_loss=None, *, beta=BETA, statistics=None, **options):
    parameters = policy.named_parameters().values()
    for parameter in parameters:
        parameter.grad = None
    outputs = backward(
        policy,
        objective,
        _parts(block, plan, objective, weighting, statistics=statistics, **options),
        temperature=TEMPERATURE,
        backend="chunked",
        beta=beta,
        statistics=statistics,
        seed=0,
        value_loss=value_loss,
    )
    gradient = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    return sum(output.loss.detach() for output in outputs), gradient, outputs


def _composition(preset, **parameters):
    found = algorithm(preset, parameters)
    return replace(found.objective, kl=KLPenalty("k3"), entropy_bonus=EntropyBonus(BONUS)), found.weighting


def _assert_same(one, other, tolerance):
    for a, b in zip(one[:2], other[:2], strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


def test_what_a_tool_said_is_learnt_as_by_cross_entropy_however_a_step_is_cut():
    policy, alpha, pairs = _policy(), 0.3, []
    for number, length in enumerate((7, 3, 5)):
        ids = torch.randint(3, 23, (3 + length,), generator=torch.Generator().manual_seed(number)).tolist()
        trained = np.arange(length) % 4 < 2
        pairs.append((Prompt("p", "", (3, 4, 5)), Completion("p", ids[3:], "", "stop", trained=trained)))
    batch = pack(pairs, observed=True)
    zeros = torch.zeros(batch.num_tokens, dtype=torch.float64)
    tokens = TokenBatch(batch.sequence, 3, advantage=zeros, token_weight=zeros, logp_old=zeros)

    def gradient(plan, policy):
        for parameter in policy.named_parameters().values():
            parameter.grad = None
        outputs = backward(
            policy,
            Objective(),
            _parts(MicroBatch(batch, tokens), plan, Objective(), TokenMean()),
            temperature=TEMPERATURE,
            backend="chunked",
            seed=0,
            observations=Observations(alpha),
        )
        found = torch.cat([p.grad.flatten() for p in policy.named_parameters().values() if p.grad is not None])
        return on_host(step_numbers(outputs)), found

    logps = []
    for prompt, completion in pairs:
        ids = torch.tensor([*prompt.token_ids, *completion.token_ids])
        logp = (policy.model(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        of_tokens = logp.gather(1, ids[1:, None]).squeeze(1)[2:]
        logps.append(of_tokens[torch.from_numpy(~completion.trained)])
    loss = -alpha * torch.cat(logps).mean()
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    expected = torch.cat([each.flatten() for each in torch.autograd.grad(loss, parameters)])
    for rows in (((0, 1, 2),), ((2,), (1, 0))):
        for sharing in (True, False):
            policy.shares_prompts = sharing
            numbers, found = gradient(StepPlan((0, 1, 2), rows), policy)
            assert numbers["loss/total"] == pytest.approx(loss.item(), rel=1e-12)
            assert numbers["loss/observations"] == pytest.approx(loss.item() / alpha, rel=1e-12)
            assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()


WHOLE = StepPlan(tuple(range(8)), ((0, 1, 2, 3, 4, 6, 7),))
CUTS = {
    "one sequence a row": StepPlan(tuple(range(8)), tuple((s,) for s in range(8) if s != 5)),
    "uneven rows": StepPlan(tuple(range(8)), ((0, 1, 2), (3,), (4, 6, 7))),
    "another order": StepPlan((5, 7, 0, 6, 4, 2, 1, 3), ((7, 0, 6), (4, 2), (1, 3))),
    "short beside long": StepPlan(tuple(range(8)), ((1, 6), (2, 4), (0, 3, 7))),  # attention pads these differently
}
PRESETS = [
    ("grpo", {}),
    ("dr_grpo", {"max_new_tokens": 12}),
    ("dapo", {}),
    ("gspo", {"epsilon_low": 0.2, "epsilon_high": 0.2}),
    ("cispo", {"epsilon_max": 1.1}),
    ("rloo", {}),
]


@pytest.mark.parametrize(("preset", "parameters"), PRESETS)
def test_the_cut_and_the_order_change_loss_and_gradient_by_float64_rounding_only(preset, parameters):
    policy = _policy()
    block, composition = _block(policy), _composition(preset, **parameters)
    whole = _gradient(policy, block, WHOLE, *composition)
    assert whole[1].abs().max() > 1e-3
    for plan in CUTS.values():
        _assert_same(_gradient(policy, block, plan, *composition), whole, 1e-12)


def test_the_token_mean_of_each_micro_batch_depends_on_the_cut_as_it_says():
    policy = _policy()
    block, composition = _block(policy), _composition("bnpo")
    whole, cut = (_gradient(policy, block, plan, *composition) for plan in (WHOLE, CUTS["uneven rows"]))
    assert (whole[1] - cut[1]).abs().max() > 1e-3 * whole[1].abs().max()


def test_choices_made_once_a_block_survive_the_cut():
    policy = _policy()
    block = _block(policy)
    objective = Objective(surrogate=KlCov(fraction=0.2), filters=(TopEntropy(0.4),), entropy_bonus=EntropyBonus(BONUS))
    statistics = objective.block_statistics(block.tokens)
    block = MicroBatch(block.packed, statistics.attach(block.tokens))
    whole, *cuts = (
        _gradient(policy, block, plan, objective, TokenMean(), beta=0.0, statistics=statistics)
        for plan in (WHOLE, *CUTS.values())
    )
    assert 0 < statistics.selected.sum() < block.packed.num_tokens
    for cut in cuts:
        _assert_same(cut, whole, 1e-12)


def test_the_steps_of_an_epoch_add_up_to_the_whole_block_under_block_totals():
    policy = _policy()
    block, objective = _block(policy), Objective()
    whole = _gradient(policy, block, WHOLE, objective, TokenMean("block"), beta=0.0)[1]
    steps = [StepPlan((0, 1, 2, 3), ((0, 1), (2, 3))), StepPlan((4, 5, 6, 7), ((4, 6, 7),))]
    parts = [_gradient(policy, block, s, objective, TokenMean("block"), beta=0.0, num_steps=2)[1] for s in steps]
    torch.testing.assert_close(sum(parts) / 2, whole, rtol=1e-12, atol=1e-14)


def _oracle():
    """The same model with transformers' own attention."""
    model = load_model(GPT2, dtype=torch.float64, random_weights=True, seed=3, attention="eager")
    disable_dropout(model)
    return model


def whole_gradient(model) -> torch.Tensor:
    """The gradient of all weights that have one, as one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _each(block: MicroBatch):
    """Of each sequence with a token its number, the ids that are read, its targets and where they lie in the block."""
    inputs, first, start = block.packed.inputs, 0, 0
    for s, (length, count) in enumerate(zip(inputs.lengths, inputs.source_counts, strict=True)):
        at = slice(start, start + count)
        if count:
            yield s, inputs.input_ids[first : first + length], block.packed.target[at], at
        first, start = first + length, start + count


def _clipped_loss(logp, tokens: TokenBatch, at: slice) -> torch.Tensor:
    ratio, advantage = (logp - tokens.logp_old[at]).exp(), tokens.advantage[at]
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def _by_formula(model, block: MicroBatch, rows) -> torch.Tensor:
    """The gradient of GRPO with k3 and entropy bonus, written out over full logits.

    ``rows``: what makes the logits of one sequence, so that its prompt may be padded or not.
    """
    loss = torch.zeros((), dtype=torch.float64)
    for _, ids, target, at in _each(block):
        log_probabilities = (rows(ids)[-len(target) :] / TEMPERATURE).log_softmax(-1)
        logp = log_probabilities.gather(1, target[:, None])[:, 0]
        d = logp - block.tokens.logp_ref[at]
        penalty = (-d).exp() - 1 + d
        loss = loss + (_clipped_loss(logp, block.tokens, at) + BETA * penalty).mean() / 8  # the empty sequence too
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
        loss = loss - BONUS * entropy.sum() / block.packed.num_tokens
    loss.backward()
    return whole_gradient(model)


@pytest.mark.parametrize("padding", [0, 5])
def test_the_gradient_is_that_of_full_logits_one_sequence_at_a_time_with_or_without_padded_prompts(padding):
    policy, oracle = _policy(), _oracle()
    block = _block(policy)
    [output] = _gradient(policy, block, WHOLE, *_composition("grpo"))[2]
    clipped = output.policy.clipped_low | output.policy.clipped_high
    assert 0 < clipped.sum() < block.packed.num_tokens  # the case tests something

    def logits(tokens):
        padded = torch.cat([torch.zeros(padding, dtype=torch.long), tokens])[None]
        mask = (torch.arange(padded.shape[1]) >= padding).long()[None]
        positions = (torch.arange(padded.shape[1]) - padding).clamp(min=0)[None]
        return oracle(input_ids=padded, attention_mask=mask, position_ids=positions, use_cache=False).logits[0]

    expected = _by_formula(oracle, block, logits)
    found = _gradient(policy, block, CUTS["uneven rows"], *_composition("grpo"))[1]
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("tokens_per_micro_batch", [20, 1000])
def test_the_first_step_after_scoring_has_ratio_exactly_1(checkpointing, autocast, tokens_per_micro_batch):
    policy = _policy(LLAMA, torch.float32, autocast=autocast)
    if checkpointing:
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    block = _block(policy, torch.float32)
    plan = plan_epoch(
        [range(4), range(4, 8)],
        block.packed.inputs,
        tokens_per_step=20,
        packing=Packing(tokens_per_micro_batch, share_prompts=False),
        seed=1,
    )
    logp = scores_of(policy, block.packed, micro_batches_of(plan), temperature=TEMPERATURE, backend="auto").logp
    block = _with(block, logp_old=logp, logp_ref=logp)
    outputs = _gradient(policy, block, plan[0], *_composition("grpo"))[2]
    assert len(outputs) > 1 or tokens_per_micro_batch == 1000
    for output in outputs:
        assert (output.policy.token_log_ratio == 0).all()
        assert (output.policy.kl == 0).all()
    numbers = on_host(step_numbers(outputs))
    assert numbers["ratio/min"] == numbers["ratio/max"] == 1
    assert numbers["kl_ref/k3_mean"] == numbers["kl_old/k1_mean"] == 0


def test_tokens_of_dropped_completions_weigh_nothing_and_their_garbage_reaches_no_gradient():
    policy = _policy()
    block = _block(policy)
    dropped = [s == 2 for s in range(8)]
    plain = _gradient(policy, block, WHOLE, *_composition("dapo"), dropped=dropped)
    garbage = torch.where(block.tokens.sequence == 2, torch.nan, 0.0)
    spoilt = _with(block, logp_old=block.tokens.logp_old + garbage, logp_ref=block.tokens.logp_ref - garbage)
    _assert_same(_gradient(policy, spoilt, WHOLE, *_composition("dapo"), dropped=dropped), plain, 1e-12)
    without = StepPlan((0, 1, 3, 4, 5, 6, 7), ((0, 1, 3, 4, 6, 7),))  # the token mean does not know it was there
    _assert_same(_gradient(policy, block, without, *_composition("dapo")), plain, 1e-12)


def test_weights_belong_to_the_step():
    plan = StepPlan((4, 5, 6, 7), ((4,), (6, 7)))
    parts = _parts(_block(_policy()), plan, Objective(), SequenceMean(), num_steps=3)
    # four sequences (one empty) of 2, 11 and 6 tokens
    assert [p.tokens.token_weight.unique().tolist() for p in parts] == [[1 / 8], [1 / 44, 1 / 24]]


@pytest.mark.parametrize(
    ("scope", "sums"), [("step", [14 / 27, 5 / 27, 8 / 27]), ("micro_batch", [1 / 3, 1 / 3, 1 / 3])]
)
def test_the_weights_of_the_entropy_bonus_sum_to_1(scope, sums):
    objective = Objective(entropy_bonus=EntropyBonus(BONUS, scope=scope))
    dropped = [s == 6 for s in range(8)]
    parts = _parts(_block(_policy()), CUTS["uneven rows"], objective, MicroBatchTokenMean(), dropped=dropped)
    assert [float(p.tokens.entropy_weight.sum()) for p in parts] == pytest.approx(sums, abs=1e-12)


def test_a_step_without_a_token_is_refused():
    policy = _policy()
    with pytest.raises(InputError, match="a step with a scored token"):
        _gradient(policy, _block(policy), StepPlan((5,), ()), *_composition("grpo"))


def test_the_outputs_of_a_step_hold_no_graph_that_leads_to_a_parameter():
    policy = _policy()
    *_, outputs = _gradient(policy, _block(policy), CUTS["uneven rows"], *_composition("grpo"))
    assert len(outputs) == 3
    assert not any(_in_a_graph(p) for p in policy.model.parameters() if p.requires_grad)


# --- what is not computed twice, or for nothing ---------------------------------------------------------------------

SILENT = (0, 4)  # sequences of advantage 0, and of weight 0
LEFT_OUT = 6


def _with_silent(policy: Policy) -> MicroBatch:
    block = _block(policy)
    silent = torch.isin(block.tokens.sequence, torch.tensor(SILENT))
    return _with(block, advantage=block.tokens.advantage.masked_fill(silent, 0.0))


def _plan(block: MicroBatch, *, share: bool, by_cost: bool, leave_out: bool) -> StepPlan:
    live = [s not in (*SILENT, LEFT_OUT) for s in range(8)]
    [plan] = plan_epoch(
        [range(4), range(4, 8)],
        block.packed.inputs,
        tokens_per_step=1000,
        packing=Packing(30, share_prompts=share, hidden_size=4 if by_cost else None),
        nonzero_advantage=live if leave_out else None,
        seed=0,
    )
    return plan


WITHOUT_LEFT_OUT = {"dropped": [s == LEFT_OUT for s in range(8)]}


@pytest.mark.parametrize(("preset", "parameters"), PRESETS)
def test_every_saving_alone_and_together_leaves_loss_and_gradient_to_1e12(preset, parameters):
    found = algorithm(preset, parameters)
    assert found.silent_without_advantage
    options = {"beta": 0.0, **WITHOUT_LEFT_OUT}
    shared, apart = _policy(), _policy(share_prompts=False)
    block = _with_silent(shared)
    plain = _plan(block, share=False, by_cost=False, leave_out=False)
    whole = _gradient(apart, block, plain, found.objective, found.weighting, **options)
    assert whole[1].abs().max() > 1e-3
    for share, by_cost, leave_out in product((False, True), repeat=3):
        plan = _plan(block, share=share, by_cost=by_cost, leave_out=leave_out)
        assert sorted(plan.zero_advantage) == ([0, 4, 6] if leave_out else [])
        policy = shared if share else apart
        _assert_same(_gradient(policy, block, plan, found.objective, found.weighting, **options), whole, 1e-12)


def test_the_numbers_of_a_first_step_count_dead_sequences_as_scoring_saw_them():
    policy = _policy()
    block, found = _with_silent(policy), algorithm("dapo")
    scored = _scores(policy, block.packed)
    block = _with(block, logp_old=scored.logp.double(), entropy_old=scored.entropy.double())
    numbers = []
    for leave_out in (False, True):
        plan, parts = _plan(block, share=True, by_cost=True, leave_out=leave_out), (found.objective, found.weighting)
        outputs = _gradient(policy, block, plan, *parts, beta=0.0, **WITHOUT_LEFT_OUT)[2]
        dead = _step(block, plan, *parts, **WITHOUT_LEFT_OUT).zero_advantage_output()
        assert (dead is not None) == leave_out
        numbers.append(on_host(step_numbers(outputs if dead is None else [*outputs, dead])))
    assert numbers[0].keys() == numbers[1].keys()
    assert numbers[1] == pytest.approx(numbers[0], rel=1e-5, abs=1e-6)
    assert numbers[0]["optimizer/tokens"] == sum(COMPLETION_LENGTHS) - COMPLETION_LENGTHS[LEFT_OUT]


def test_a_step_that_scores_itself_has_ratio_1_and_the_gradient_of_its_own_log_probs():
    policy = _policy()
    block, found = _block(policy), algorithm("grpo")
    step = _plan(block, share=True, by_cost=True, leave_out=False), found.objective, found.weighting
    own = policy.scores(block.packed.take(range(8)), temperature=TEMPERATURE, backend="chunked").logp.detach()
    expected = _gradient(policy, _with(block, logp_old=own), *step, beta=0.0)
    assert all(part.tokens.logp_old is None for part in _parts(block, *step, scores_itself=True))
    scored = _gradient(policy, block, *step, beta=0.0, scores_itself=True)
    assert all((output.policy.token_log_ratio == 0).all() for output in scored[2])
    assert (scored[1] - expected[1]).abs().max() <= 1e-12 * expected[1].abs().max()


# --- PPO ------------------------------------------------------------------------------------------------------------

CLIP = 0.4
UNSCORED, DROPPED = 3, 6  # a completion without a reward, and one whose tokens weigh 0


def _ppo_policy() -> Policy:
    """A policy whose value head has learnt something."""
    policy = _policy()
    policy.value_head = value_head_for(policy.model)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in policy.value_head.parameters():
            parameter.normal_(generator=generator)
    return policy


UNTRAINED = {"beta": 0.0, "dropped": [s == DROPPED for s in range(8)]}


def _ppo_block(policy: Policy) -> MicroBatch:
    """The block with values near those of the policy, returns, and an advantage a token."""
    block = _block(policy)
    generator = torch.Generator().manual_seed(7)
    values = _scores(policy, block.packed, temperature=1.0).value

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(block.packed.num_tokens, generator=generator, dtype=torch.float64)

    returns = (values + normal(1.0)).masked_fill(block.tokens.sequence == UNSCORED, torch.nan)
    return _with(block, advantage=normal(1.0), value_old=values + normal(0.5), value_target=returns)


def _ppo():
    found = algorithm("ppo")
    return found.objective, found.weighting, ValueLoss(coefficient=0.7, clip=CLIP)


def _ppo_by_formula(model, head, block: MicroBatch) -> torch.Tensor:
    """The gradient of PPO over full logits and transformers' own hidden states, one sequence at a time."""
    tokens, loss = block.tokens, torch.zeros((), dtype=torch.float64)
    num_trained = block.packed.num_tokens - COMPLETION_LENGTHS[DROPPED]
    num_fitted = num_trained - COMPLETION_LENGTHS[UNSCORED]
    for s, ids, target, at in _each(block):
        if s == DROPPED:
            continue
        output, count = model(ids[None], output_hidden_states=True), len(target)
        logits = output.logits[0, -count:] / TEMPERATURE
        logp = logits.log_softmax(-1)[torch.arange(count), target]
        loss = loss + _clipped_loss(logp, tokens, at).sum() / num_trained
        if s != UNSCORED:
            value = output.hidden_states[-1][0, -count:] @ head.weight[0] + head.bias
            old, returns = tokens.value_old[at], tokens.value_target[at]
            held = old + (value - old).clamp(-CLIP, CLIP)
            loss = loss + 0.35 / num_fitted * torch.maximum((value - returns) ** 2, (held - returns) ** 2).sum()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in [*model.parameters(), *head.parameters()]])


def test_the_gradient_of_ppo_is_that_of_full_logits_and_hidden_states():
    policy, oracle = _ppo_policy(), _oracle()
    block = _ppo_block(policy)
    loss, found, outputs = _gradient(policy, block, CUTS["uneven rows"], *_ppo(), **UNTRAINED)
    clipped = torch.cat([o.value.clipped for o in outputs])
    assert 2 < clipped.sum() < 20  # the case tests the clip
    head = value_head_for(oracle)
    head.load_state_dict(policy.value_head.state_dict())
    expected = _ppo_by_formula(oracle, head, block)
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()
    without = _gradient(policy, block, CUTS["uneven rows"], *_ppo()[:2], **UNTRAINED)[1]
    backbone = len(without)
    assert (found[:backbone] - without).abs().max() > 0.01 * without.abs().max()  # the value loss reaches the backbone
    numbers = on_host(step_numbers(outputs))
    assert numbers["loss/total"] == pytest.approx(float(loss), rel=1e-12)
    policy_loss = sum(float(o.policy.loss.detach()) for o in outputs)
    assert 0.7 * numbers["loss/value"] == pytest.approx(float(loss) - policy_loss, rel=1e-12)
    fitted = sum(n for s, n in enumerate(COMPLETION_LENGTHS) if s not in (UNSCORED, DROPPED))
    assert numbers["value/clipped_fraction"] == pytest.approx(int(clipped.sum()) / fitted)


@pytest.mark.parametrize("weighting", [TokenMean(), SequenceMean()])
def test_the_cut_and_the_order_change_ppo_by_float64_rounding_only(weighting):
    policy = _ppo_policy()
    block, (objective, _, value_loss) = _ppo_block(policy), _ppo()
    whole, *cuts = (
        _gradient(policy, block, plan, objective, weighting, value_loss, **UNTRAINED)
        for plan in (WHOLE, *CUTS.values())
    )
    for cut in cuts:
        _assert_same(cut, whole, 1e-12)


def test_the_value_loss_is_a_mean_over_the_steps_tokens_with_a_return_whatever_the_policys_weighting():
    policy = _ppo_policy()
    plan, dropped = StepPlan((0, 1, 2, 3, 5, 6), ((0, 3), (1, 6), (2,))), UNTRAINED["dropped"]
    for weighting in (TokenMean(), SequenceMean(), MicroBatchTokenMean()):
        parts = _parts(_ppo_block(policy), plan, Objective(), weighting, dropped=dropped)
        weights = [p.tokens.value_weight.tolist() for p in parts]
        # 4, 1 and 9 tokens of sequences 0, 1 and 2; 5 of the unscored, 11 of the dropped one
        assert weights == [[1 / 14] * 4 + [0] * 5, [1 / 14] + [0] * 11, [1 / 14] * 9]
    first, *_ = _parts(_block(policy), plan, Objective(), TokenMean(), dropped=dropped)
    assert first.tokens.value_weight is None


@pytest.mark.parametrize("scope", [None, "step", "micro_batch"])
def test_the_rows_that_a_rank_makes_alone_are_bitwise_those_among_all(scope):
    objective = Objective() if scope is None else Objective(entropy_bonus=EntropyBonus(BONUS, scope=scope))
    plan = StepPlan((0, 1, 2, 3, 5, 6), ((0, 3), (1, 6), (), (2,)))
    parts = (_ppo_block(_ppo_policy()), plan, objective, SequenceMean())
    every = _parts(*parts, dropped=UNTRAINED["dropped"])
    for places in ([0], [3, 1], [2]):
        for place, found in zip(places, _parts(*parts, dropped=UNTRAINED["dropped"], places=places), strict=True):
            wanted = every[place]
            assert found.packed.inputs.lengths == wanted.packed.inputs.lengths
            assert torch.equal(found.packed.target, wanted.packed.target)
            for name, value in vars(wanted.tokens).items():
                torch.testing.assert_close(vars(found.tokens)[name], value, rtol=0, atol=0, equal_nan=True)


def test_what_stands_where_there_is_no_return_reaches_no_gradient():
    policy = _ppo_policy()
    block = _ppo_block(policy)
    plain = _gradient(policy, block, WHOLE, *_ppo(), **UNTRAINED)
    hidden = (block.tokens.sequence == UNSCORED) | (block.tokens.sequence == DROPPED)
    spoilt = _with(block, value_old=block.tokens.value_old.masked_fill(hidden, torch.nan))
    _assert_same(_gradient(policy, spoilt, WHOLE, *_ppo(), **UNTRAINED), plain, 0.0)


def test_a_value_loss_of_a_policy_without_a_value_head_is_refused():
    policy = _ppo_policy()
    block = _ppo_block(policy)
    policy.value_head = None
    with pytest.raises(InputError, match="value head"):
        _gradient(policy, block, WHOLE, *_ppo(), beta=0.0)


def test_turns_weigh_the_same_however_long_they_are_and_however_the_step_is_cut():
    prompt = Prompt("7", "", (1, 2))
    two = Completion("7", (3, 4, 5, 6), "", "stop", trained=(True, True, False, True), turn=(0, 0, 0, 1))
    one, empty = (Completion("7", ids, "", "stop") for ids in ((3,), ()))
    packed = pack([(prompt, each) for each in (two, one, empty, two)])
    n = packed.num_tokens
    tokens = TokenBatch(packed.sequence, 4, torch.zeros(n), torch.ones(n), logp_old=torch.zeros(n), turn=packed.turn)
    # Five turns with a token, two of them dropped, which stay in the number: 1/5 each, over the tokens of the turn.
    wanted = torch.tensor([0.1, 0.1, 0.2, 0.2, 0.0, 0.0, 0.0])
    for rows in [((0, 1, 3),), ((0,), (1,), (3,))]:
        step = StepPlan((0, 1, 2, 3), rows), algorithm("grpo").objective, TurnMean()
        parts = _parts(MicroBatch(packed, tokens), *step, dropped=[False] * 3 + [True])
        torch.testing.assert_close(torch.cat([each.tokens.token_weight for each in parts]), wanted)
