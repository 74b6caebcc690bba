"""Adapters on one base: log-probs of sampling are those of training, and nobody changes another's bits."""

import numpy as np
import pytest
import torch

from logitless.errors import InputError, TrainingError, UnavailableError
from logitless.head import fused, token_scores
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.loading import load_model
from logitless.rollout.gpu import steps
from logitless.rollout.sampling import SamplingOptions
from logitless.tinker import trainer as module
from logitless.tinker.adapter import Shape
from logitless.tinker.losses import checked_config
from logitless.tinker.samples import Request
from logitless.tinker.trainer import Trainer
from logitless.tinker.wire import NO_TOKEN, AdamParams, Datum, ForwardBackward, Targets, Top
from tests.models.mixtures import MIXTURES
from tests.tinker import tiny

CONFIG = {**tiny.CONFIG, "vocab_size": 11, "max_position_embeddings": 256}
SHAPES = [Shape(4, True, True, True), Shape(2, True, False, False), Shape(4, True, True, True)]


@pytest.fixture
def row_invariant(request, monkeypatch):
    """Whether layers are row-invariant; the kernels of a GPU then run under the interpreter, with its head."""
    if request.param:
        pytest.importorskip("triton")
        monkeypatch.setattr(steps, "STEPS", 3)
        monkeypatch.setattr(fused, "why_not", fused._unsupported)
    return request.param


def with_both_layers(*marks):
    """Runs a test with either kind of layers; the marks are of the interpreted one."""
    params = [pytest.param(False, id="transformers"), pytest.param(True, id="row-invariant", marks=marks)]
    return pytest.mark.parametrize("row_invariant", params, indirect=True)


def trainer_of(row_invariant, **options):
    model = load_model(CONFIG, random_weights=True, seed=1)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # distributions that are not flat
    return Trainer(model, character_tokenizer("abcdefgh"), row_invariant=row_invariant, **options)


def batch(sequences, loss="cross_entropy", forward_only=False, config=None, **inputs):
    """Sequences of tokens as data whose targets are the next tokens."""
    data = []
    for ids in sequences:
        given = {name: np.full((len(ids) - 1, 1), value, np.float32) for name, value in inputs.items()}
        data.append(Datum(np.array(ids[:-1]), np.array(ids[1:])[:, None], given or {"weights": ones(ids)}, True))
    return ForwardBackward(loss, checked_config(loss, config or {}), forward_only, tuple(data))


def ones(ids):
    return np.ones((len(ids) - 1, 1), np.float32)


def data_of(seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 11, size=n).tolist() for n in (6, 9, 4)]


def trained(trainer, adapter, seed, num_steps=2):
    for step in range(num_steps):
        trainer.forward_backward(adapter, batch(data_of(seed + step)))
        trainer.optim_step(adapter, AdamParams(learning_rate=0.02))
    return adapter


def requests(name):
    options = SamplingOptions(max_new_tokens=4)
    return [Request(f"{name}{i}", tuple(ids), 2, options, 7, True) for i, ids in enumerate(((3, 4, 5), (6,)))]


def tokens_and_logprobs(samples):
    return [(s.tokens.tolist(), s.logprobs.tolist()) for sequences, _ in samples for s in sequences]


@with_both_layers()
def test_log_probs_of_samples_are_those_of_forward_in_every_bit(row_invariant):
    trainer = trainer_of(row_invariant)
    assert trainer.exact == row_invariant
    adapter = trained(trainer, trainer.create(SHAPES[0], seed=0), 5, num_steps=1)
    asked = requests("a")
    found = trainer.sample([(adapter.snapshot(), each) for each in asked])
    whole = [[*r.tokens, *s.tokens.tolist()] for r, (sequences, _) in zip(asked, found, strict=True) for s in sequences]
    outputs, _ = trainer.forward_backward(adapter, batch(whole, forward_only=True))
    starts = [len(request.tokens) - 1 for request in asked for _ in range(2)]
    scored = [output["logprobs"][start:].tolist() for output, start in zip(outputs, starts, strict=True)]
    assert scored == [logprobs for _, logprobs in tokens_and_logprobs(found)]
    asked = Request("p", tuple(whole[0]), 1, SamplingOptions(max_new_tokens=1), 0, True)
    prompts = trainer.sample([(adapter, asked)])
    assert prompts[0][1].logprobs[1:].tolist() == outputs[0]["logprobs"].tolist()
    assert np.isnan(prompts[0][1].logprobs[0])
    assert sum(map(len, scored)) > 8


@with_both_layers(pytest.mark.slow)
def test_likeliest_tokens_and_named_ones_have_the_log_probs_of_forward(row_invariant):
    trainer = trainer_of(row_invariant)
    adapter = trained(trainer, trainer.create(SHAPES[0], seed=0), 5, num_steps=1)
    ids, options, k = (3, 4, 5, 9, 6), SamplingOptions(max_new_tokens=4), CONFIG["vocab_size"]
    cells = np.array([7, -1, 8, -1, -1, -1, 3, 3])  # two of each of four positions
    targets = Targets(cells, np.repeat(np.arange(4), 2), (4, 2), None)
    request = Request("a", ids, 1, options, 7, True, 2, top_prompt=k, top_sampled=k, targets=targets)
    [([sample], prompt)] = trainer.sample([(adapter, request)])
    assert prompt.top.ids[:3].tolist() == [[NO_TOKEN[0]] * k] * 3  # scored are the last two
    # sums of at most 24 products, of log-probs below 20, in another order
    room, whole = 24 * 20 * 2**-23, [*ids, *sample.tokens.tolist()]
    for top, first in ((Top(prompt.top.ids[3:], prompt.top.logprobs[3:]), 2), (sample.top, len(ids) - 1)):
        for row, (tokens, logprobs) in enumerate(zip(top.ids.tolist(), top.logprobs, strict=True)):
            assert sorted(tokens) == list(range(k))
            assert (np.diff(logprobs) <= 0).all()
            assert np.abs(logprobs - forward_of(trainer, adapter, whole[: first + row + 1], tokens)).max() < room
    for value, token, row in zip(prompt.targets[1], cells, targets.rows, strict=True):
        expected = forward_of(trainer, adapter, ids[: row + 1], [token])[0] if token >= 0 else 0
        assert abs(value - expected) < (room if token >= 0 else 1e-30)


def forward_of(trainer, adapter, ids, tokens):
    """Log-probs of ``forward`` of each token behind these."""
    outputs, _ = trainer.forward_backward(adapter, batch([[*ids, token] for token in tokens], forward_only=True))
    return np.array([each["logprobs"][-1] for each in outputs])


def sampled(trainer, weights, name="a"):
    return tokens_and_logprobs(trainer.sample([(weights, each) for each in requests(name)]))


@pytest.mark.parametrize("num_tenants", [1, pytest.param(3, marks=pytest.mark.slow)])
@with_both_layers(pytest.mark.slow)
def test_each_of_several_adapters_has_the_bits_of_running_alone(row_invariant, num_tenants):
    shapes = SHAPES[-num_tenants:]

    def alone(index):
        trainer = trainer_of(row_invariant)
        adapter = trained(trainer, trainer.create(shapes[index], seed=index), 10 * index)
        return adapter, sampled(trainer, adapter)

    trainer = trainer_of(row_invariant)
    adapters = [trainer.create(shape, seed=index) for index, shape in enumerate(shapes)]
    base = sampled(trainer, None)
    for step in range(2):  # gradients of all are under way at once
        work = [(adapter, batch(data_of(10 * index + step))) for index, adapter in enumerate(adapters)]
        trainer.forward_backward_together(work)
        trainer.sample([(adapter, each) for adapter in adapters for each in requests("b")])
        for adapter in reversed(adapters):
            trainer.optim_step(adapter, AdamParams(learning_rate=0.02))
    asked = [(weights, each) for each in requests("a") for weights in (*adapters, None)]  # ids are of each anew
    mixed = trainer.sample(asked)
    for index, adapter in enumerate([*adapters, None]):
        own = tokens_and_logprobs(mixed[index :: num_tenants + 1])
        if adapter is None:
            assert own == base
            break
        by_itself, samples = alone(index)
        assert all(torch.equal(a, b) for a, b in zip(adapter.weights, by_itself.weights, strict=True))
        assert own == samples == sampled(trainer, adapter.snapshot())


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("row_invariant", [pytest.param(True, marks=pytest.mark.slow)], indirect=True)
def test_a_tenant_whose_numbers_are_not_finite_leaves_the_others_alone(row_invariant, broken):
    trainer = trainer_of(row_invariant)
    adapters = [trained(trainer, trainer.create(SHAPES[0], seed=seed), seed, num_steps=1) for seed in range(3)]
    gradients, samples = [], [sampled(trainer, adapter) for adapter in adapters]
    for adapter in adapters:
        trainer.forward_backward(adapter, batch(data_of(7)))
        gradients.append([weight.grad for weight in adapter.weights])
        for weight in adapter.weights:
            weight.grad = None
    with torch.no_grad():
        adapters[1].weights[1].fill_(broken)
    trainer.forward_backward_together([(adapter, batch(data_of(7))) for adapter in adapters])
    for number in (0, 2):
        assert all(torch.equal(a, w.grad) for a, w in zip(gradients[number], adapters[number].weights, strict=True))
        assert sampled(trainer, adapters[number]) == samples[number]


def test_targets_that_sequences_have_in_common_are_read_once_and_have_the_gradient_of_each(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(fused, "why_not", fused._unsupported)
    shared = [3 + i % 8 for i in range(18)]
    sequences = [[*shared, *ending] for ending in ((4, 5, 6), (7, 8, 9), (4, 9, 3))]
    trainer, rows = trainer_of(True, tokens_per_row=32), list[int]()
    adapter = trainer.create(SHAPES[1], seed=0)
    with torch.no_grad():
        for factor in adapter.weights:
            factor.add_(0.1)

    def scores(hidden, *given, **options):
        rows.append(len(hidden))
        return token_scores(hidden, *given, **options)

    monkeypatch.setattr(module, "token_scores", scores)
    outputs, _ = trainer.forward_backward(adapter, batch(sequences))
    # 17 targets are shared, 4 and 7 are the next one, and 2 are each sequence's own; 24 inputs are one packed row
    assert rows == [17 + 2 + 3 * 2]
    gradients = [weight.grad for weight in adapter.weights]
    adapter.drop_gradients()
    for ids, output in zip(sequences, outputs, strict=True):
        alone, _ = trainer.forward_backward(adapter, batch([ids]))
        assert output["logprobs"].tolist() == alone[0]["logprobs"].tolist()
    for gradient, weight in zip(gradients, adapter.weights, strict=True):
        # sums over 60 targets and at most 16 widths, in another order
        assert (gradient - weight.grad).abs().max() < 60 * 16 * 2**-23 * weight.grad.abs().max()


def test_more_adapters_than_places_are_sampled_in_turn_and_larger_ranks_get_larger_places():
    pytest.importorskip("triton")
    trainer = trainer_of(True, memory=300_000)
    adapters = [trainer.create(Shape(rank, True, False, False), seed=rank) for rank in (1, 2, 20)]
    asked = [Request("a", (3,), 1, SamplingOptions(max_new_tokens=1), 0)]
    trainer.sample([(adapters[0], *asked)])
    most = trainer._stack.num_places
    assert trainer._stack.rank == 16
    trainer.sample([(adapter, *asked) for adapter in adapters])
    assert (trainer._stack.rank, trainer._stack.num_places) == (32, 1)
    snapshot = adapters[0].snapshot()
    for factor in snapshot.weights:
        factor.fill_(torch.nan)
    trainer._placed([snapshot])  # of what the adapter holds still
    assert all(maps.a.isfinite().all() for maps in trainer._stack.maps.values())
    assert 1 < most <= module.TOGETHER
    assert trainer.stack_bytes < 300_000 // 4


def test_requests_add_to_one_gradient_and_the_step_is_adams_in_float64():
    trainer = trainer_of(False)
    adapter = trained(trainer, trainer.create(SHAPES[1], seed=0), 1)
    before = [(w.detach().double(), *(adapter.optimizer.state[w][k].double() for k in ("exp_avg", "exp_avg_sq")))
              for w in adapter.weights]  # fmt: skip
    first, second = data_of(3), data_of(4)
    trainer.forward_backward(adapter, batch(first))
    trainer.forward_backward(adapter, batch(second, forward_only=True))
    trainer.forward_backward(adapter, batch(second))
    gradients = [w.grad.double() for w in adapter.weights]
    trainer.optim_step(adapter, AdamParams(learning_rate=0.01, weight_decay=0.1))
    for weight, (old, m, v), gradient in zip(adapter.weights, before, gradients, strict=True):
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        step = (m / (1 - 0.9**3)) / ((v / (1 - 0.95**3)).sqrt() + 1e-12)
        expected = (1 - 0.01 * 0.1) * old - 0.01 * step
        # The update is at most a few times the rate; float32 rounds weight and update a dozen times.
        assert (weight.detach().double() - expected).abs().max() < 32 * torch.finfo(torch.float32).eps
    assert all(weight.grad is None for weight in adapter.weights)


def test_targets_in_several_columns_are_scored_each():
    trainer = trainer_of(False)
    adapter = trainer.create(SHAPES[0], seed=0)
    ids, targets = np.array([3, 4, 5, 6]), np.array([[4, 5], [5, 6], [6, 7], [7, 8]])
    datum = Datum(ids, targets, {"weights": np.full((4, 2), 0.5, np.float32)}, False)
    outputs, metrics = trainer.forward_backward(adapter, ForwardBackward("cross_entropy", {}, True, (datum,)))
    for k in range(2):
        one = Datum(ids, targets[:, k : k + 1], {"weights": np.ones((4, 1), np.float32)}, True)
        alone, _ = trainer.forward_backward(adapter, ForwardBackward("cross_entropy", {}, True, (one,)))
        assert outputs[0]["logprobs"][:, k].tolist() == alone[0]["logprobs"].tolist()
    assert metrics["loss:sum"] == pytest.approx(-0.5 * outputs[0]["logprobs"].sum(), rel=1e-6)


def test_an_adapter_that_is_saved_and_loaded_goes_on_with_the_same_bits():
    trainer = trainer_of(False)
    adapter = trained(trainer, trainer.create(SHAPES[0], seed=0), 1)
    tensors, state = trainer.tensors(adapter), trainer.optimizer_state(adapter)
    again = trainer.loaded(SHAPES[0], tensors, state)
    fresh = trainer.loaded(SHAPES[0], tensors, {})
    for each in (adapter, again, fresh):
        trained(trainer, each, 9, num_steps=1)
    assert all(torch.equal(a, b) for a, b in zip(adapter.weights, again.weights, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(adapter.weights, fresh.weights, strict=True))


def test_a_step_whose_gradient_is_not_whole_or_not_finite_is_left_out():
    trainer = trainer_of(False)
    adapter = trained(trainer, trainer.create(SHAPES[0], seed=0), 1)
    before = [weight.detach().clone() for weight in adapter.weights]
    trainer.forward_backward(adapter, batch(data_of(2)))
    adapter.broken = "request 5: out of memory"
    with pytest.raises(TrainingError, match="request 5"):
        trainer.optim_step(adapter, AdamParams(learning_rate=1.0))
    trainer.forward_backward(adapter, batch(data_of(2), weights=float("inf")))
    with pytest.raises(TrainingError, match="a finite gradient"):
        trainer.optim_step(adapter, AdamParams(learning_rate=1.0))
    assert all(torch.equal(a, b) for a, b in zip(adapter.weights, before, strict=True))
    assert all(weight.grad is None for weight in adapter.weights)


def test_a_step_that_fails_midway_leaves_no_gradient_and_no_outdated_copy(monkeypatch):
    trainer = trainer_of(False)
    adapter = trained(trainer, trainer.create(SHAPES[1], seed=0), 1)
    trainer.forward_backward(adapter, batch(data_of(2)))
    monkeypatch.setattr(adapter.optimizer, "step", lambda: 1 / 0)
    before = adapter.version
    with pytest.raises(ZeroDivisionError):
        trainer.optim_step(adapter, AdamParams())
    assert adapter.version != before
    assert all(weight.grad is None for weight in adapter.weights)


def test_tensors_of_another_model_are_refused_by_name():
    trainer = trainer_of(False)
    adapter = trained(trainer, trainer.create(SHAPES[1], seed=0), 1)
    tensors, state = trainer.tensors(adapter), trainer.optimizer_state(adapter)
    name = next(iter(tensors))
    for changed in ({name: torch.zeros(3, 3)}, {"more": torch.zeros(1)}):
        with pytest.raises(InputError, match="for an adapter of this base model"):
            trainer.loaded(SHAPES[1], tensors | changed, {})
    with pytest.raises(InputError, match=name):
        trainer.loaded(SHAPES[1], tensors, state | {f"{name}.exp_avg": torch.zeros(3, 3)})


def test_a_mixture_of_experts_is_refused_in_words():
    model = load_model(next(iter(MIXTURES.values())), random_weights=True)
    with pytest.raises(UnavailableError, match="a mixture of experts"):
        Trainer(model, character_tokenizer("abcdefgh"), row_invariant=False)


@with_both_layers(pytest.mark.slow)
def test_a_prompt_of_all_positions_has_the_scores_of_a_shorter_one_and_samples_without_a_token(row_invariant):
    trainer = trainer_of(row_invariant)
    adapter = trained(trainer, trainer.create(SHAPES[0], seed=1), seed=1)
    tokens = tuple(np.random.default_rng(0).integers(3, 11, size=trainer.limit).tolist())
    options, weights = SamplingOptions(max_new_tokens=1), adapter.snapshot()
    whole = Request("a", tokens, 2, options, 1, only_scores=True, scores_prompt=True)
    shorter = Request("a", tokens[:-1], 2, options, 1, scores_prompt=True)
    [(sequences, scores)], [(sampled, expected)] = (trainer.sample([(weights, each)]) for each in (whole, shorter))
    assert [(len(each.tokens), len(each.logprobs), each.stopped) for each in sequences] == [(0, 0, False)] * 2
    assert [len(each.tokens) for each in sampled] == [1, 1]
    assert np.allclose(scores.logprobs[1:-1], expected.logprobs[1:], rtol=0, atol=0 if row_invariant else 1e-5)
    assert -30 < scores.logprobs[-1] < 0
