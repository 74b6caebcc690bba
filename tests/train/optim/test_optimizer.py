"""The learning rate by hand, what is decayed, and a step that is not taken leaving no trace."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from logitless.train.optim.optimizer import adamw, learning_rate, take_step
from logitless.train.optim.optimizer import implementation as written_implementation
from logitless.train.recipe.training import OptimizerSection
from tests.ranks import run_on_ranks

CPU = torch.device("cpu")


def _parameters(*gradients: list[float]) -> list[nn.Parameter]:
    parameters = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.ones(len(gradient)))
        parameter.grad = torch.tensor(gradient)
        parameters.append(parameter)
    return parameters


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "step", "progress", "expected"),
    [
        ("constant", 0, 0, 0.9, 2.0),
        ("constant", 4, 0, 0.0, 0.5),
        ("constant", 4, 3, 0.0, 2.0),
        ("linear", 0, 10, 0.25, 1.5),
        ("cosine", 0, 10, 0.5, 1.0),
        ("cosine", 0, 10, 0.25, 2.0 * (1 + 0.5**0.5) / 2),
        ("linear", 10, 4, 0.5, 0.5),
    ],
)
def test_the_learning_rate_is_peak_times_warm_up_times_decay(schedule, warmup_steps, step, progress, expected):
    options = OptimizerSection(learning_rate=2.0, schedule=schedule, warmup_steps=warmup_steps)
    assert learning_rate(step, progress, options) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("implementation", "foreach", "fused"),
    [("auto", True, False), ("foreach", True, False), ("fused", False, True), ("loop", False, False)],
)
def test_the_implementation_is_the_one_that_was_asked_for(implementation, foreach, fused):
    optimizer = adamw(_parameters([1.0]), OptimizerSection(implementation=implementation), CPU)
    assert optimizer.defaults["foreach"] is foreach
    assert optimizer.defaults["fused"] is fused
    assert written_implementation(optimizer) == ("foreach" if implementation == "auto" else implementation)


def _step(parameters, **options):
    """A step of AdamW: the norm of the gradient, and whether it was taken."""
    made = {name: options.pop(name) for name in ("value_head", "value_head_factor") if name in options}
    rate = options.pop("rate", 0.1)
    return take_step(adamw(parameters, OptimizerSection(**options), CPU, **made), rate=rate, max_grad_norm=None)


def test_vectors_frozen_weights_and_those_without_a_gradient_are_left_out_of_the_decay():
    matrix, vector, frozen = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    unused = nn.Parameter(torch.ones(2, 2))
    frozen.requires_grad_(False)
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    assert _step([matrix, vector, frozen, unused], weight_decay=0.5)[1]
    assert torch.equal(matrix, torch.full((2, 2), 0.95))  # 1 - 0.1 * 0.5
    for left in (vector, frozen, unused):
        assert torch.equal(left, torch.ones_like(left))


@pytest.mark.parametrize("implementation", ["foreach", "fused", "loop"])
def test_the_first_step_of_adam_is_the_learning_rate_against_the_gradients_sign(implementation):
    (parameter,) = _parameters([3.0, -0.5])
    norm, taken = _step([parameter], rate=0.25, implementation=implementation)
    assert taken
    assert float(norm) == pytest.approx((9 + 0.25) ** 0.5)
    assert parameter.tolist() == pytest.approx([0.75, 1.25], abs=1e-6)
    assert parameter.grad is None


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_changes_neither_weights_nor_state(broken):
    parameters = _parameters([1.0, 2.0], [3.0])
    optimizer = adamw(parameters, OptimizerSection(), CPU)
    take_step(optimizer, rate=0.1, max_grad_norm=1.0)
    weights = [p.detach().clone() for p in parameters]
    moments = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in parameters]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    parameters[1].grad[0] = broken
    norm, taken = take_step(optimizer, rate=0.5, max_grad_norm=1.0)
    assert not taken
    assert not torch.isfinite(norm)
    for parameter, weight, moment in zip(parameters, weights, moments, strict=True):
        assert torch.equal(parameter, weight)
        assert parameter.grad is None
        assert all(torch.equal(optimizer.state[parameter][k], v) for k, v in moment.items())


def test_the_gradient_is_clipped_by_the_norm_over_all_parameters_and_a_small_one_is_not_scaled_up():
    parameters = _parameters([3.0], [4.0])
    norm, _ = take_step(torch.optim.SGD(parameters, lr=1.0), rate=1.0, max_grad_norm=1.0)
    assert float(norm) == 5.0
    assert [p.item() for p in parameters] == pytest.approx([1 - 0.6, 1 - 0.8], abs=1e-5)
    (parameter,) = _parameters([0.3])
    take_step(torch.optim.SGD([parameter], lr=1.0), rate=1.0, max_grad_norm=1.0)
    assert parameter.item() == pytest.approx(0.7)


def test_the_value_head_has_a_rate_of_its_own_and_is_not_decayed():
    matrix, readout = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(1, 2))
    options = {"weight_decay": 0.5, "implementation": "loop", "value_head": [readout], "value_head_factor": 4.0}
    matrix.grad, readout.grad = torch.zeros(2, 2), torch.zeros(1, 2)
    _step([matrix], **options)
    assert torch.equal(matrix, torch.full((2, 2), 0.95))
    assert torch.equal(readout, torch.ones(1, 2))
    readout.grad = torch.tensor([[3.0, -0.5]])
    _step([], **options)
    assert readout.tolist()[0] == pytest.approx([0.6, 1.4], abs=1e-6)  # 1 -+ 4 * 0.1
    assert len(adamw([matrix], OptimizerSection(), CPU).param_groups) == 1  # none for an absent value head


def test_the_value_head_is_clipped_by_its_own_norm_and_does_not_shrink_the_models_gradient():
    (first, second), (readout,) = _parameters([3.0], [4.0]), _parameters([300.0, 400.0])
    optimizer = torch.optim.SGD([{"params": [first, second]}, {"params": [readout], "rate_factor": 2.0}], lr=1.0)
    norm, _ = take_step(optimizer, rate=1.0, max_grad_norm=1.0)
    assert float(norm) == 5.0
    assert [p.item() for p in (first, second)] == pytest.approx([1 - 0.6, 1 - 0.8], abs=1e-5)
    assert readout.tolist() == pytest.approx([1 - 2 * 0.6, 1 - 2 * 0.8], abs=1e-5)


def test_a_value_head_without_a_finite_gradient_stops_the_whole_step():
    (parameter,), (readout,) = _parameters([3.0]), _parameters([float("nan")])
    optimizer = torch.optim.SGD([{"params": [parameter]}, {"params": [readout], "rate_factor": 2.0}], lr=1.0)
    norm, taken = take_step(optimizer, rate=1.0, max_grad_norm=1.0)
    assert (float(norm), taken) == (3.0, False)
    assert (parameter.item(), readout.item()) == (1.0, 1.0)
    assert parameter.grad is readout.grad is None


class _DTensorCalls(TorchDispatchMode):
    """How many operations are asked of DTensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += any("DTensor" in each.__name__ for each in types)
        return function(*args, **(kwargs or {}))


def _steps(rank, implementation):
    """Three steps on shards (the second rank has none of the vector), by torch's class and by ours."""
    mesh = init_device_mesh("cpu", (2,))
    found, calls = [], []
    for ours in (True, False):
        torch.manual_seed(0)
        given = [nn.Parameter(distribute_tensor(torch.randn(n), mesh, [Shard(0)])) for n in ((3, 2), (1,))]
        options = OptimizerSection(weight_decay=0.5, implementation=implementation)
        optimizer = adamw(given, options, CPU)
        if not ours:
            optimizer.__class__ = torch.optim.AdamW
        for number in range(3):
            for p in given:
                p.grad = distribute_tensor(torch.full(p.shape, 0.5 - number), mesh, [Shard(0)])
            with _DTensorCalls() as seen:
                optimizer.step()
        calls.append(seen.count)
        state = [optimizer.state[p][key] for p in given for key in ("exp_avg", "exp_avg_sq")]
        assert all(moment.placements == (Shard(0),) for moment in state)
        found.append([tensor.full_tensor().detach() for tensor in [*given, *state]])
    return found, calls


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_shards_are_updated_as_torch_updates_them_without_asking_dtensors(implementation):
    for (ours, of_torch), (calls, calls_of_torch) in run_on_ranks(2, _steps, implementation):
        assert all(torch.equal(a, b) for a, b in zip(ours, of_torch, strict=True))
        assert calls == 0 < calls_of_torch
