"""The laws of a teacher in a step: any cut gives the same gradient, which is that of full logits."""

from dataclasses import replace

import pytest
import torch

from logitless.data.packing import pack
from logitless.float32_sums import end_to_end
from logitless.models.loading import disable_dropout, load_model
from logitless.models.lora import LoraOptions, add_lora
from logitless.objective.distillation import Distillation
from logitless.objective.presets import algorithm
from logitless.train.learn.policy import AdaptersOff, Itself, Policy
from logitless.train.learn.step import backward, on_host, step_numbers
from logitless.train.learn.teacher import Teacher
from logitless.train.recipe.teacher import TeacherSection
from logitless.types import Completion, Prompt
from tests.train.learn.test_step import (
    CUTS,
    GPT2,
    ROWS,
    TEMPERATURE,
    WHOLE,
    _assert_same,
    _block,
    _each,
    _oracle,
    _parts,
    _policy,
    _scores,
    whole_gradient,
)

WEIGHT = 0.4
CASES = [
    ("forward_kl", None, "grpo"),
    ("reverse_kl", None, "dapo"),
    ("jensen_shannon", 0.3, "rloo"),
    ("total_variation", None, "grpo"),
]
WIDER = GPT2 | {"n_embd": 24, "n_head": 4, "vocab_size": 29}
"""A teacher with another width, and a vocabulary that is padded further."""


def _teacher(kind="reverse_kl", beta=None, **options) -> Teacher:
    model = load_model(WIDER, dtype=torch.float64, random_weights=True, seed=9)
    disable_dropout(model)
    section = TeacherSection(source="x/y", divergence=kind, beta=beta, weight=WEIGHT, **options)
    return Teacher([Policy(model.requires_grad_(False).eval())], section)


def _adapted() -> Policy:
    """A policy with adapters that have learnt something."""
    model = add_lora(_policy().model, LoraOptions(rank=2, targets=("c_fc", "c_attn")))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3, generator=generator)
    return Policy(model.double())


def _gradient(policy, block, plan, teacher, preset="grpo", dropped=None, weight=WEIGHT):
    """Loss and gradient of a step under a preset and a teacher."""
    found = algorithm(preset)
    parameters = [p for p in policy.named_parameters().values() if p.requires_grad]
    for parameter in parameters:
        parameter.grad = None
    outputs = backward(
        policy,
        found.objective,
        _parts(block, plan, found.objective, found.weighting, **({} if dropped is None else {"dropped": dropped})),
        temperature=TEMPERATURE,
        backend="chunked",
        seed=0,
        teacher=teacher,
        distillation=Distillation(weight=weight),
    )
    gradient = torch.cat([p.grad.flatten() for p in parameters])
    return sum(output.loss.detach() for output in outputs), gradient, outputs


@pytest.mark.parametrize(("kind", "beta", "preset"), CASES)
def test_the_cut_and_the_order_change_a_step_with_a_teacher_by_float64_rounding_only(kind, beta, preset):
    policy, teacher = _policy(), _teacher(kind, beta)
    block = _block(policy)
    whole = _gradient(policy, block, WHOLE, teacher, preset)
    without = _gradient(policy, block, WHOLE, None, preset)
    assert (whole[1] - without[1]).abs().max() > 0.01 * without[1].abs().max()
    for plan in CUTS.values():
        _assert_same(_gradient(policy, block, plan, teacher, preset), whole, 1e-12)


def test_shared_prompts_change_nothing_of_either_model():
    shared, apart, teacher = _policy(), _policy(share_prompts=False), _teacher()
    teacher.models[0].shares_prompts = False
    expected = _gradient(apart, _block(apart), WHOLE, teacher)
    teacher.models[0].shares_prompts = True
    _assert_same(_gradient(shared, _block(shared), WHOLE, teacher), expected, 1e-12)


def test_the_gradient_is_that_of_full_logits_one_sequence_at_a_time():
    policy, teacher = _policy(), _teacher(temperature=1.3)
    block = _block(policy)
    loss, found, outputs = _gradient(policy, block, CUTS["uneven rows"], teacher)
    _, without, _ = _gradient(policy, block, CUTS["uneven rows"], None)
    oracle = _oracle()
    expected, every = torch.zeros((), dtype=torch.float64), []
    for _, ids, target, _ in _each(block):
        p = (oracle(ids[None]).logits[0, -len(target) :] / TEMPERATURE).log_softmax(-1)
        q = (teacher.models[0].model(input_ids=ids[None]).logits[0, -len(target) :, :23] / 1.3).log_softmax(-1)
        divergence = (p.exp() * (p - q)).sum(-1)
        every.append(divergence.detach())
        expected = expected + WEIGHT * divergence.mean() / 8  # grpo: a mean over sequences, the empty one too
    expected.backward()
    of_term = whole_gradient(oracle)
    assert (found - without - of_term).abs().max() <= 1e-12 * of_term.abs().max()
    numbers = on_host(step_numbers(outputs))
    assert numbers["teacher/divergence"] == pytest.approx(float(torch.cat(every).mean()), rel=1e-12)
    assert numbers["loss/total"] == pytest.approx(float(loss), rel=1e-12)


def test_dropped_completions_learn_nothing_from_the_teacher():
    policy, teacher = _policy(), _teacher()
    block = _block(policy)
    dropped = [s == 6 for s in range(8)]
    whole = _gradient(policy, block, WHOLE, teacher, "dapo", dropped)
    rows = ((0, 1, 2, 3), (4, 7))
    without = _gradient(policy, block, type(WHOLE)((0, 1, 2, 3, 4, 5, 7), rows), teacher, "dapo")
    _assert_same(whole, without, 1e-12)


def test_the_base_of_an_adapter_teaches_as_a_copy_of_it_does():
    policy = _adapted()
    block, section = _block(_policy()), TeacherSection(source="base", divergence="forward_kl")
    copy = Teacher([Policy(_policy().model.requires_grad_(False).eval())], section)
    base = Teacher([AdaptersOff(policy)], section)
    expected = _gradient(policy, block, WHOLE, copy)
    assert expected[2][0].distillation.divergence.max() > 1e-3
    for plan in CUTS.values():
        _assert_same(_gradient(policy, block, plan, base), expected, 1e-12)
    scored = [
        each.scores(block.packed, temperature=TEMPERATURE, backend="chunked").logp.detach() for each in (base, copy)
    ]
    torch.testing.assert_close(*scored, rtol=1e-12, atol=1e-12)


def test_a_policy_that_is_its_teacher_gets_the_gradient_of_the_policy_loss_alone():
    policy = _policy()
    block = _block(policy)
    same = Teacher([Policy(_policy().model)], TeacherSection(source="x/y", divergence="reverse_kl"))
    found, without = (_gradient(policy, block, WHOLE, teacher) for teacher in (same, None))
    assert found[2][0].distillation.divergence.tolist() == [0] * block.packed.num_tokens
    _assert_same(found, without, 1e-12)
    assert all(p.grad is None for p in same.models[0].model.parameters())


def _with_prompts_of_their_own(block):
    """The block with two teachers: of the first group, and of the second but for one sequence that no one grades."""
    generator = torch.Generator().manual_seed(7)
    pairs, owner = [], [0, 0, 0, 0, 1, 1, -1, 1]
    prompts = [Prompt(str(n), "", torch.randint(0, 23, (n,), generator=generator).tolist()) for n in (2, 5, 9)]
    counts = block.packed.inputs.source_counts
    for s, target in enumerate(torch.split(block.packed.target, counts)):
        prompt = prompts[s % 3]  # of a group not all have the same
        pairs.append((prompt, Completion(prompt.id, target.tolist(), "", "stop")))
    teacher = torch.tensor(owner)[block.packed.sequence]
    packed = replace(block.packed, teacher=teacher, inputs_of_teacher=pack(pairs).inputs)
    return replace(block, packed=packed), pairs, owner


def test_several_teachers_after_their_own_prompts_give_the_gradient_of_full_logits_for_any_cut():
    policy, one = _policy(), _teacher("forward_kl")
    section = one.section.model_copy(update={"source": {"x": "a/b", "y": "self"}})
    teacher = Teacher([*one.models, Itself(policy)], section)
    block, pairs, owner = _with_prompts_of_their_own(_block(policy))
    whole = _gradient(policy, block, WHOLE, teacher)
    for plan in CUTS.values():
        _assert_same(_gradient(policy, block, plan, teacher), whole, 1e-12)
    oracle = _oracle()
    models = [teacher.models[0].model, oracle]
    loss, logp = torch.zeros((), dtype=torch.float64), torch.full((block.packed.num_tokens,), torch.nan).double()
    for s, ids, target, at in _each(block):
        if owner[s] < 0:
            continue
        prompt, completion = pairs[s]
        own = torch.tensor([*prompt.token_ids, *completion.token_ids[:-1]])
        p = (oracle(ids[None]).logits[0, -len(target) :] / TEMPERATURE).log_softmax(-1)
        with torch.no_grad():
            logits = models[owner[s]](input_ids=own[None]).logits[0, -len(target) :] / TEMPERATURE
        q = logits[:, :23].log_softmax(-1)
        loss = loss + WEIGHT * (q.exp() * (q - p)).sum(-1).mean() / 8
        logp[at] = logits.log_softmax(-1).gather(1, target[:, None]).squeeze(1)
    loss.backward()
    of_term = whole_gradient(oracle)
    difference = whole[1] - _gradient(policy, block, WHOLE, None)[1] - of_term
    assert difference.abs().max() <= 1e-12 * of_term.abs().max()
    scored = _scores(teacher, block.packed, [ROWS[:3], ROWS[3:]]).logp
    torch.testing.assert_close(scored, logp.float(), rtol=1e-5, atol=1e-5, equal_nan=True)


def _away_and_back(device: str) -> None:
    teacher = _teacher(place="host")
    parameters = list(teacher.models[0].model.to(device).parameters())
    teacher.models[0].device, before = parameters[0].device, [p.detach().clone() for p in parameters]
    teacher.wait()
    waiting = [p.data_ptr() for p in parameters]
    assert {p.device.type for p in parameters} == {"cpu"}

    def interrupted():
        with teacher.on_device():
            assert {p.device.type for p in parameters} == {device}
            assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
            raise KeyError("interrupted")

    with pytest.raises(KeyError, match="interrupted"):
        interrupted()
    assert [p.data_ptr() for p in parameters] == waiting


def test_weights_that_are_one_tensor_are_so_again_on_the_host_and_on_the_device():
    teacher = _teacher(place="host")
    parameters = list(teacher.models[0].model.parameters())
    first, second = [each for each in parameters if each.ndim == 2 and each.shape[1] == 24][:2]
    whole = torch.cat([first.detach(), second.detach()])  # as ``lay_end_to_end`` leaves them
    first.data, second.data = whole.split([len(first), len(second)])
    before = [each.detach().clone() for each in parameters]

    def check():
        assert end_to_end([first, second]) is not None
        assert all(torch.equal(*pair) for pair in zip(parameters, before, strict=True))

    teacher.wait()
    check()
    with teacher.on_device():
        check()
    check()


def test_weights_that_wait_on_the_host_are_the_same_after_a_use_that_failed():
    _away_and_back("cpu")


@pytest.mark.gpu
def test_weights_that_wait_on_the_host_are_on_the_gpu_while_they_are_used():
    _away_and_back("cuda")
