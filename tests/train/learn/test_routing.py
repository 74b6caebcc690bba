"""The load-balancing loss of a step: transformers' own of one batch, however the step is cut."""

import sys
from dataclasses import replace

import pytest
import torch

from logitless.data.packing import StepPlan, pack
from logitless.models.activations import set_modes
from logitless.models.router import Routers, RoutingSums, freeze_routers, router_loss_coefficient, router_modules
from logitless.objective.objective import Objective
from logitless.objective.surrogate.unclipped import Reinforce
from logitless.objective.weighting import TokenMean
from logitless.train.learn.policy import Policy
from logitless.train.learn.routing import RouterLoss, routing_numbers
from logitless.train.learn.step import OptimizerStep, backward
from logitless.types import Completion, Prompt, TokenBatch
from tests.head.interpreter import complete_interpreter, interpreted
from tests.models.mixtures import MIXTURES, WITH_LOSS, mixture
from tests.models.tiny import tiny

if interpreted():
    complete_interpreter()

COEFFICIENT = 0.7
LENGTHS = ((3, 4), (3, 1), (3, 9), (7, 5), (7, 2), (7, 6))  # of prompt and completion
WHOLE = StepPlan(tuple(range(6)), (tuple(range(6)),))
CUTS = {
    "one sequence a row": StepPlan(tuple(range(6)), tuple((s,) for s in range(6))),
    "uneven rows": StepPlan(tuple(range(6)), ((0, 1, 2, 3), (4,), (5,))),
    "another order": StepPlan((5, 0, 4, 2, 1, 3), ((5, 0), (4, 2, 1, 3))),
    "rows without a sequence": StepPlan(tuple(range(6)), ((0, 5, 1), (), (2, 3, 4), ())),
}
# Norms and rotary embeddings compute in float32, in which the order of other sequences may round a number otherwise.
TOLERANCE = 1e-6


def _pairs():
    generator = torch.Generator().manual_seed(5)

    def ids(count):
        return tuple(torch.randint(3, 61, (count,), generator=generator).tolist())

    prompts = {length: Prompt(str(length), "", ids(length)) for length, _ in LENGTHS}
    return [(prompts[p], Completion(str(p), ids(c), "", "stop")) for p, c in LENGTHS]


def _policy(name, *, share_prompts=False, dtype=torch.float64, **changes):
    return Policy(mixture(name, dtype=dtype, **changes).train(), share_prompts=share_prompts)


def _step(policy, plan, *, signal=0.0, count_all=False, coefficient=COEFFICIENT, likelihood=False):
    """Loss, gradient and numbers of a step whose advantages are multiples of the signal.

    With ``likelihood`` the policy loss is the mean negative log-likelihood of completions.
    """
    packed = pack(_pairs())
    advantage = signal * torch.linspace(-1, 1, packed.num_tokens, dtype=torch.float64)
    objective = Objective(surrogate=Reinforce()) if likelihood else Objective()
    advantage = torch.ones_like(advantage) if likelihood else advantage
    tokens = TokenBatch(packed.sequence, packed.num_sequences, advantage, torch.ones_like(advantage))
    tokens = replace(tokens, logp_old=torch.full_like(advantage, -4.0))
    parts = OptimizerStep(packed, tokens, plan, objective, TokenMean(), [False] * 6).micro_batches()
    router_loss = RouterLoss(policy, coefficient) if coefficient else None
    if router_loss is not None:
        router_loss.count(part.packed for part in parts[0 if count_all else 1 :])
        if count_all:
            router_loss.settle()
    policy.model.zero_grad(set_to_none=True)
    outputs = backward(
        policy,
        objective,
        parts,
        temperature=1.0,
        backend="chunked",
        seed=0,
        router_loss=router_loss,
    )
    gradient = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    sums = [each for output in outputs for each in output.routing]
    numbers = routing_numbers(sums, policy, coefficient=coefficient)
    return sum(output.loss.detach() for output in outputs), gradient, numbers


def _assert_same(one, other, tolerance=TOLERANCE):
    (loss, gradient, numbers), (other_loss, other_gradient, other_numbers) = one, other
    torch.testing.assert_close(loss, other_loss, rtol=tolerance, atol=0)
    largest = max(float(g.abs().max()) for g in gradient.values())
    zero = torch.zeros(())
    for name in gradient.keys() | other_gradient.keys():
        difference = gradient.get(name, zero) - other_gradient.get(name, zero)
        assert float(difference.abs().max()) <= tolerance * largest, name
    assert numbers.keys() == other_numbers.keys()
    for name, number in numbers.items():
        torch.testing.assert_close(number, other_numbers[name], rtol=tolerance, atol=0)


def _padded(*, last):
    """Ids and mask of the sequences as transformers reads them, with their last tokens or without."""
    rows = [[*prompt.token_ids, *completion.token_ids] for prompt, completion in _pairs()]
    rows = [row if last else row[:-1] for row in rows]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return ids, torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])


@pytest.mark.parametrize("name", [*WITH_LOSS, "minimax_m3_vl_text", "granitemoehybrid"])
def test_of_one_batch_loss_and_gradient_are_transformers_own(name):
    """``output_router_logits`` on the padded batch of what a step reads: all but the last token of each sequence."""
    policy = _policy(name)
    loss, gradient, numbers = _step(policy, WHOLE)
    ids, mask = _padded(last=False)
    model = mixture(name, dtype=torch.float64).train()
    model.set_attn_implementation("eager")
    with Routers(model).read() as choices:
        their_loss = model(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss
    if name.startswith("granite"):  # 5.17 keeps no logits of it
        function = sys.modules[type(model).__module__].load_balancing_loss_func
        their_loss = function(tuple(each.logits for each in choices), 4, 2, mask)
    (COEFFICIENT * their_loss).backward()
    theirs = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    largest = max(float(g.abs().max()) for g in theirs.values())
    assert float(loss) == pytest.approx(COEFFICIENT * float(their_loss.detach()), rel=1e-6)
    assert float(numbers["loss/router"]) == pytest.approx(float(their_loss.detach()), rel=1e-6)
    assert any("gate" in key or "router" in key for key in theirs)
    for key, theirs_of in theirs.items():
        torch.testing.assert_close(gradient[key], theirs_of, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("frozen", [False, True], ids=["no loss", "frozen"])
@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "minimax_m2", "gpt_oss"])
def test_without_a_router_loss_or_with_frozen_routers_a_batch_has_transformers_own_loss_and_gradients(name, frozen):
    """Of the model without ``output_router_logits``, and ``requires_grad_(False)`` on routers where they are frozen."""
    policy = _policy(name, output_router_logits=False)
    if frozen:
        freeze_routers(policy.model)
    loss, gradient, _ = _step(policy, WHOLE, coefficient=router_loss_coefficient(policy.model, None), likelihood=True)
    model = mixture(name, dtype=torch.float64, output_router_logits=False).train()
    model.set_attn_implementation("eager")
    routers = router_modules(model)
    for router in routers.values():
        router.requires_grad_(not frozen)
    ids, mask = _padded(last=True)
    labels = ids.where(mask.bool(), -100)
    for row, (prompt, _) in zip(labels, _pairs(), strict=True):
        row[: len(prompt.token_ids)] = -100
    their_loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    their_loss.backward()
    theirs = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert float(loss) == pytest.approx(float(their_loss.detach()), rel=1e-6)
    assert gradient.keys() == theirs.keys()
    assert any(key.startswith(f"model.{each}.") for key in theirs for each in routers) != frozen
    largest = max(float(g.abs().max()) for g in theirs.values())
    for key, theirs_of in theirs.items():
        torch.testing.assert_close(gradient[key], theirs_of, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize(
    "name", [pytest.param("qwen3_moe", marks=pytest.mark.slow), "glm4_moe"]
)  # softmax; sigmoid with a correction bias
def test_exact_layers_have_the_gradients_of_transformers_ones_recomputed_or_not_and_repeat_them_in_every_bit(name):
    pytest.importorskip("triton")
    from logitless.models.row_invariant.layers import install_row_invariant

    own = {"norm_topk_prob": True} if name == "qwen3_moe" else {}
    policy = _policy(name, dtype=torch.float32, **own)
    wanted = _step(policy, WHOLE, signal=1.0)
    plain = _step(policy, WHOLE, signal=1.0, coefficient=0.0)[1]
    gates = [key for key in plain if key.endswith("mlp.gate.weight")]
    assert gates
    assert all(float((wanted[1][key] - plain[key]).norm()) > 0.1 * float(plain[key].norm()) for key in gates)
    assert install_row_invariant(policy.model).exact
    found = _step(policy, CUTS["uneven rows"], signal=1.0)
    _assert_same(wanted, found, 3e-5)  # float32
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed = _step(policy, CUTS["uneven rows"], signal=1.0)
    set_modes(policy.model, ["recompute", "selective"])
    for loss, gradient, _ in (checkpointed, _step(policy, CUTS["uneven rows"], signal=1.0)):
        assert torch.equal(loss, found[0])
        assert all(torch.equal(gradient[key], found[1][key]) for key in found[1].keys() | gradient.keys())


@pytest.mark.parametrize("name", ["qwen3_moe", "minimax_m2"])
@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_of_a_step_gives_the_same_loss_and_gradient(name, cut):
    whole = _step(_policy(name), WHOLE, signal=1.0)
    _assert_same(whole, _step(_policy(name), CUTS[cut], signal=1.0))
    _assert_same(whole, _step(_policy(name), CUTS[cut], signal=1.0, count_all=True))


@pytest.mark.parametrize("cut", ["whole", *CUTS])
def test_shared_prompts_count_as_often_as_they_are_shared(cut):
    apart = _step(_policy("qwen3_moe"), WHOLE, signal=1.0)
    _assert_same(apart, _step(_policy("qwen3_moe", share_prompts=True), CUTS.get(cut, WHOLE), signal=1.0))


def test_one_micro_batch_costs_no_further_pass_and_each_other_one_costs_one():
    policy, passes = _policy("qwen3_moe"), []
    plain = policy._hidden
    policy._hidden = lambda inputs: passes.append(torch.is_grad_enabled()) or plain(inputs)
    _step(policy, WHOLE)
    assert passes == [True]
    passes.clear()
    _step(policy, CUTS["uneven rows"])
    assert passes == [False, False, True, True, True]


@pytest.mark.parametrize("name", MIXTURES)
def test_the_numbers_say_how_even_the_load_is(name):
    """By the plain choices of every token of every sequence."""
    policy = _policy(name)
    numbers = _step(policy, CUTS["uneven rows"], coefficient=0.0)[2]
    packed = pack(_pairs())
    with policy.routers.read() as choices, torch.no_grad():
        policy._hidden(packed.inputs)
    load = torch.stack([torch.bincount(each.experts.flatten(), minlength=4) for each in choices]).double()
    load /= load.mean(-1, keepdim=True)
    entropy = torch.cat([torch.distributions.Categorical(logits=each.logits).entropy() for each in choices]).mean()
    expected = {
        "router/entropy": float(entropy),
        "router/load_max": float(load.max()),
        "router/load_min": float(load.min()),
        "router/dropped_fraction": 0.0,
    }
    assert {key: float(value) for key, value in numbers.items()} == pytest.approx(expected, rel=1e-6)


def test_a_dense_model_has_no_numbers_of_routers():
    policy = Policy(tiny("llama"))
    with policy.routing() as found, torch.no_grad():
        policy.scores(pack(_pairs()), temperature=1.0, backend="chunked")
    assert found == []
    assert routing_numbers(found, policy) == {}


def test_sums_that_travel_as_one_vector_arrive_as_they_were():
    generator = torch.Generator().manual_seed(0)
    sums = RoutingSums(*(torch.rand(size, generator=generator).double() for size in (3, 3, (2, 3), ())))
    found = sums.unflat(sums.flat)
    for name, value in vars(sums).items():
        assert torch.equal(getattr(found, name), value)
