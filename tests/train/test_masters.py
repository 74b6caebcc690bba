"""Float32 masters of bfloat16 weights: what the optimizer holds, what the model reads, what autograd adds up."""

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from logitless.errors import ConfigurationError, TrainingError
from logitless.train import fused_adamw
from logitless.train import masters as masters_module
from logitless.train.checkpoint import (
    load_checkpoint,
    optimizer_tensors,
    parameter_tensors,
    restore_optimizer,
    restore_parameters,
)
from logitless.train.config import Recipe
from logitless.train.fused_adamw import (
    chunks_of,
    clip_factor,
    cut,
    fused_update,
    gradient_norm,
    pieces_of,
    update_from_host,
)
from logitless.train.masters import MasterAdamW, lower_to, master_of
from logitless.train.run import start
from logitless.train.tensor_files import read_places, write_tensors
from tests.head.interpreter import complete_interpreter, interpreted
from tests.train.fake_driver import FakeDriver
from tests.train.tiny import tiny_recipe

BETAS, EPS, RATE, DECAY = (0.9, 0.999), 1e-8, 1e-3, 0.1


def a_layer(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(7, 5)


def trained(layer: nn.Linear, steps: int, *, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Masters (or weights) after some steps on gradients that do not depend on the weights' dtype."""
    if dtype is not None:
        lower_to(dtype, layer.parameters())
    optimizer = MasterAdamW([{"params": list(layer.parameters())}], lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in layer.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.take_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return [master_of(parameter).detach() for parameter in layer.parameters()]


def test_masters_follow_float32_training_bit_for_bit():
    for master, plain in zip(
        trained(a_layer(), 5, dtype=torch.bfloat16), trained(a_layer(), 5, dtype=None), strict=True
    ):
        assert torch.equal(master, plain)


def test_the_model_holds_its_masters_rounded_after_every_step():
    layer = a_layer()
    masters = trained(layer, 3, dtype=torch.bfloat16)
    for parameter, master in zip(layer.parameters(), masters, strict=True):
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter.detach(), master.bfloat16())


def test_steps_too_small_for_bfloat16_add_up():
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    lower_to(torch.bfloat16, layer.parameters())
    optimizer = MasterAdamW([{"params": [layer.weight]}], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        layer.weight.grad = torch.ones(1, 1)
        optimizer.take_gradients()
        optimizer.step()
    assert layer.weight.item() == pytest.approx(0.99, abs=2**-8)
    assert layer.weight.item() < 1


def test_gradients_of_micro_batches_add_up_in_float32():
    layer = nn.Linear(1, 1, bias=False)
    lower_to(torch.bfloat16, layer.parameters())
    for _ in range(1000):  # in bfloat16 the sum would stop at 256
        layer(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.item() == 1000.0


def test_frozen_and_float64_weights_are_left_alone():
    layer = a_layer().double()
    layer.bias.requires_grad_(False)
    lower_to(torch.bfloat16, layer.parameters())
    assert layer.weight.dtype == layer.bias.dtype == torch.float64
    assert master_of(layer.weight) is layer.weight


def test_a_float64_run_is_the_same_in_every_number():
    layers, x = [a_layer().double() for _ in range(2)], torch.randn(4, 7, dtype=torch.float64)
    lower_to(torch.bfloat16, layers[0].parameters())
    options = {"lr": RATE, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    ours = MasterAdamW([{"params": list(layers[0].parameters())}], **options)
    plain = torch.optim.AdamW(layers[1].parameters(), **options)
    for _ in range(5):
        for layer in layers:
            layer(x).square().sum().backward()
        ours.take_gradients()
        ours.step()
        plain.step()
        ours.zero_grad()
        plain.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*(layer.parameters() for layer in layers), strict=True))


def where_kernels_run() -> str:
    if interpreted():
        complete_interpreter()
    elif not torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter or a GPU")
    return "cuda" if torch.cuda.is_available() else "cpu"


def test_the_norm_in_one_pass_is_that_of_all_gradients_together():
    device = where_kernels_run()
    gradients = [torch.randn(n, device=device) for n in (1, 3, 1025, 70000)]
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    expected = torch.cat(gradients).double().norm()
    # Sums of squares of 1024 lanes, each of up to 64 numbers, then of parts in float64.
    assert abs(float(gradient_norm(chunks_of(parameters), gradients)) / float(expected) - 1) < 64 * 2**-24
    gradients[2][7] = torch.inf
    assert not torch.isfinite(gradient_norm(chunks_of(parameters), gradients))


def test_a_norm_that_is_not_finite_leaves_masters_moments_and_copies_as_they_are():
    device = where_kernels_run()
    master, copy = nn.Parameter(torch.randn(70, device=device)), torch.ones(70, dtype=torch.bfloat16, device=device)
    moments = [torch.full_like(master, 0.5).detach() for _ in range(2)]
    before = master.detach().clone()
    fused_update(
        chunks_of([master]), [master], [torch.full_like(master, torch.nan)], [moments[0]], [moments[1]], [copy],
        scale=clip_factor(torch.tensor(torch.nan, device=device), 1.0),
        rate=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, step=1,
    )  # fmt: skip
    assert torch.equal(master, before)
    assert torch.equal(copy, torch.ones_like(copy))
    assert all(torch.equal(m, torch.full_like(m, 0.5)) for m in moments)


@pytest.mark.parametrize("sizes", [(1, 3), (1025, 70000, 64)])
def test_the_fused_update_equals_torch(sizes: tuple[int, ...]):
    device = where_kernels_run()
    ours = [nn.Parameter(torch.randn(n, device=device)) for n in sizes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    moments = [[torch.zeros_like(p) for p in ours] for _ in range(2)]
    copies = [torch.zeros_like(p, dtype=torch.bfloat16).detach() for p in ours]
    reference = torch.optim.AdamW(theirs, lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, foreach=False)
    for step in range(1, 4):
        gradients = [torch.randn_like(p) for p in ours]
        fused_update(
            chunks_of(ours),
            ours,
            gradients,
            *moments,
            copies,
            scale=torch.full((1,), 0.5, device=device),
            rate=RATE,
            betas=BETAS,
            eps=EPS,
            weight_decay=DECAY,
            step=step,
        )
        for p, g in zip(theirs, gradients, strict=True):
            p.grad = g / 2
        reference.step()
    for our, their, copy in zip(ours, theirs, copies, strict=True):
        # Each step moves a weight by at most about 2 RATE, computed in a dozen float32 operations.
        bound = 3 * 12 * torch.finfo(torch.float32).eps * (2 * RATE + their.detach().abs())
        assert bool(((our - their).abs() <= bound).all())
        assert torch.equal(copy, our.detach().bfloat16())


@pytest.fixture
def host_that_kernels_read(monkeypatch) -> FakeDriver:
    """Memory of the host that counts as page-locked, which the interpreter's kernels do not need."""
    if not interpreted():
        pytest.skip("a GPU has tests of its own")
    where_kernels_run()
    return FakeDriver().install(monkeypatch)


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8), most=st.sampled_from([4, 8, 20]))
def test_pieces_hold_every_element_once_in_order_at_aligned_places_of_their_own(sizes: list[int], most: int):
    pieces = cut(sizes, most)
    assert [(part.tensor, part.first + i) for piece in pieces for part in piece for i in range(part.length)] == [
        (tensor, i) for tensor, size in enumerate(sizes) for i in range(size)
    ]
    for piece in pieces:
        ends = [part.place + part.length for part in piece]
        assert ends[-1] <= most
        assert all(part.place >= end for part, end in zip(piece[1:], ends, strict=False))
        assert all(part.place % 4 == part.first % 4 == 0 for part in piece)


class Lanes:
    """Streams of a device that does its work late: one thing after the other of each, in any order that marks allow."""

    def __init__(self, chance: random.Random):
        self.chance, self.lanes = chance, [Lane(self)]
        self.at = self.lanes[0]

    def current(self, _: torch.device) -> "Lane":
        return self.lanes[0]

    def beside(self, _: torch.device) -> "Lane":
        self.lanes.append(Lane(self))
        return self.lanes[-1]

    def later(self, work: Callable[..., None]) -> Callable[..., None]:
        return lambda *args, **named: self.at.work.append(partial(work, *args, **named))

    def finish(self) -> None:
        """Until the first lane is done, behind which the caller puts what reads the results."""
        while self.lanes[0].done < len(self.lanes[0].work):
            ready = [lane for lane in self.lanes if lane.is_ready()]
            assert ready, "each waits for another"
            lane = self.chance.choice(ready)
            work = lane.work[lane.done]
            lane.done += 1
            if callable(work):
                work()


class Lane:
    def __init__(self, lanes: Lanes):
        self.lanes, self.work, self.done = lanes, [], 0

    def is_ready(self) -> bool:
        if self.done == len(self.work):
            return False
        work = self.work[self.done]
        return callable(work) or work[0].done >= work[1]

    @contextmanager
    def run(self) -> Iterator[None]:
        before, self.lanes.at = self.lanes.at, self
        yield
        self.lanes.at = before

    def mark(self) -> "tuple[Lane, int]":
        return self, len(self.work)

    def after(self, mark: "tuple[Lane, int]") -> None:
        self.work.append(mark)


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6), seed=st.integers(0, 2**32))
def test_pieces_are_neither_updated_before_they_have_arrived_nor_overwritten_before_they_have_left(sizes, seed):
    def update(_, masters, gradients, moments1, moments2, copies):
        for master, gradient, moment1, moment2, copy in zip(
            masters, gradients, moments1, moments2, copies, strict=True
        ):
            moment1 += gradient
            moment2 += moment1 * moment1
            master -= moment2
            copy.copy_(master)

    columns = [[torch.randint(1, 9, (size,)).float() for size in sizes] for _ in range(5)]
    expected = [[each.clone() for each in column] for column in columns]
    update(None, *expected)
    lanes = Lanes(random.Random(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_adamw, "PIECE", 8)
        patch.setattr(fused_adamw, "_Lane", lanes)
        patch.setattr(fused_adamw, "_copy", lanes.later(fused_adamw._copy))
        patch.setattr(fused_adamw, "fused_update", lanes.later(update))
        update_from_host(pieces_of(columns[0], torch.device("cpu")), *columns)
    lanes.finish()
    for column, want in zip(columns, expected, strict=True):
        assert all(map(torch.equal, column, want))


@pytest.mark.parametrize("piece", [4, 16, fused_adamw.PIECE])
@pytest.mark.usefixtures("host_that_kernels_read")
def test_masters_on_the_host_are_updated_from_the_parameters_gradients_with_the_same_bits(piece, monkeypatch):
    monkeypatch.setattr(fused_adamw, "PIECE", piece)  # a layer of 7 x 5 with its 5 biases: eleven pieces, three, or one
    layers, optimizers = [a_layer(), a_layer()], []
    for layer, on_host in zip(layers, (True, False), strict=True):
        lower_to(torch.bfloat16, layer.parameters())
        optimizers.append(MasterAdamW([{"params": list(layer.parameters())}], on_host=on_host, lr=RATE))
    for step in range(3):
        norms = []
        for layer, optimizer in zip(layers, optimizers, strict=True):
            generator = torch.Generator().manual_seed(step)
            for parameter in layer.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.take_gradients()
            assert (layer.weight.grad is None) == (not optimizer.on_host)
            norm, taken = optimizer.clipped_step(1.0)
            assert taken
            norms.append(norm)
            optimizer.zero_grad()
            assert layer.weight.grad is master_of(layer.weight).grad is None
        assert torch.equal(*norms)
    for one, other in zip(*(layer.parameters() for layer in layers), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(master_of(one), master_of(other))
        states = [optimizer.state[master_of(p)] for optimizer, p in zip(optimizers, (one, other), strict=True)]
        assert all(torch.equal(states[0][key], states[1][key]) for key in ("step", "exp_avg", "exp_avg_sq"))


@pytest.mark.usefixtures("host_that_kernels_read")
def test_a_plain_step_moves_masters_on_the_host_too():
    found = []
    for plain in (True, False):
        layer = a_layer()
        lower_to(torch.bfloat16, layer.parameters())
        optimizer = MasterAdamW([{"params": list(layer.parameters())}], on_host=True, lr=RATE)
        optimizer.step()  # no gradient yet: nothing moves
        for parameter in layer.parameters():
            parameter.grad = torch.ones(parameter.shape)
        if plain:
            optimizer.step()
        else:
            optimizer.clipped_step(None)
        found.append([master_of(p) for p in layer.parameters()])
    assert not torch.equal(found[0][0], a_layer().weight)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("on_host", [True, False], ids=["on the host", "on the device"])
@pytest.mark.usefixtures("host_that_kernels_read")
def test_an_update_that_fails_in_its_middle_leaves_an_optimizer_that_says_so(on_host, monkeypatch):
    layer, updated, update = a_layer(), [], fused_adamw.fused_update

    def failing(chunks, masters, *args, **named):
        if updated:
            raise RuntimeError("the second part")
        updated.append(len(masters))
        update(chunks, masters, *args, **named)

    lower_to(torch.bfloat16, layer.parameters())
    groups = [{"params": [layer.weight]}, {"params": [layer.bias]}]
    optimizer = MasterAdamW(groups, on_host=on_host, lr=RATE)
    for parameter in layer.parameters():
        parameter.grad = torch.ones(parameter.shape)
    optimizer.take_gradients()
    optimizer.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(fused_adamw, "fused_update", failing)
        patch.setattr(masters_module, "fused_update", failing)
        with pytest.raises(RuntimeError, match="the second part"):
            optimizer.clipped_step(None)
    assert updated == [1]
    held = [master_of(parameter).detach().clone() for parameter in layer.parameters()]
    assert not torch.equal(held[0], a_layer().weight)
    assert torch.equal(held[1], a_layer().bias)  # half a step
    for go_on in (lambda: optimizer.clipped_step(None), optimizer.step, optimizer.state_dict):
        with pytest.raises(TrainingError, match=r"masters and moments of one step.*last checkpoint"):
            go_on()
    assert all(map(torch.equal, held, map(master_of, layer.parameters())))


def on_the_host(layer: nn.Linear) -> MasterAdamW:
    lower_to(torch.bfloat16, layer.parameters())
    return MasterAdamW([{"params": list(layer.parameters())}], on_host=True, lr=RATE)


def one_step(layer: nn.Linear, optimizer: MasterAdamW, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in layer.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def of_a_checkpoint(layer: nn.Linear, optimizer: MasterAdamW) -> dict[str, torch.Tensor]:
    masters = {name: master_of(p) for name, p in layer.named_parameters()}
    return parameter_tensors(masters) | optimizer_tensors(masters, optimizer)


@pytest.mark.parametrize("restore", ["a checkpoint", "a state dict"])
def test_masters_and_moments_on_the_host_are_page_locked_also_after_they_were_restored(
    restore, tmp_path, host_that_kernels_read
):
    layers = begun, whole, resumed = [a_layer() for _ in range(3)]
    optimizers = [on_the_host(layer) for layer in layers]
    one_step(begun, optimizers[0], 0)
    if restore == "a checkpoint":
        file = tmp_path / "held.safetensors"
        held = of_a_checkpoint(begun, optimizers[0])
        write_tensors(file, held)
        numbers = sum(place.num_bytes for place in read_places(file).values())
        assert numbers == sum(tensor.nbytes for tensor in held.values())  # and not their pages
        assert file.stat().st_size < numbers + 2000
        masters = {name: master_of(p) for name, p in resumed.named_parameters()}
        restore_parameters(masters, read := load_file(file))
        restore_optimizer(masters, optimizers[2], read)
    else:
        for parameter, other in zip(resumed.parameters(), begun.parameters(), strict=True):
            master_of(parameter).data.copy_(master_of(other))
        optimizers[2].load_state_dict(deepcopy(optimizers[0].state_dict()))
    for number in (0, 1):
        one_step(whole, optimizers[1], number)
    one_step(resumed, optimizers[2], 1)
    ends = [of_a_checkpoint(layer, optimizer) for layer, optimizer in zip(layers, optimizers, strict=True)]
    assert ends[1].keys() == ends[2].keys()
    for name, tensor in ends[1].items():
        assert torch.equal(tensor, ends[2][name]), name
        assert tensor.is_pinned() == ends[2][name].is_pinned() == (not name.endswith("/step")), name
    assert len(host_that_kernels_read.locked) == 3 * 2 * 3  # masters and two moments of two parameters each


def test_memory_of_masters_and_moments_goes_with_the_optimizer_and_its_layer(host_that_kernels_read):
    layer = a_layer()
    optimizer = on_the_host(layer)
    one_step(layer, optimizer, 0)
    assert len(host_that_kernels_read.locked) == 3 * 2
    del layer, optimizer
    gc.collect()
    assert not host_that_kernels_read.locked


def bfloat16_recipe(folder: Path, **changes: Any) -> Recipe:
    return tiny_recipe(folder, model__trained_dtype="bfloat16", model__dtype="bfloat16", **changes)


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0}], ids=["full", "lora"])
def test_a_run_in_bfloat16_resumes_bitwise_from_its_masters(tmp_path, lora):
    whole, _ = start(bfloat16_recipe(tmp_path / "whole", model__lora=lora))
    begun, _ = start(bfloat16_recipe(tmp_path / "begun", model__lora=lora, train__blocks=1))
    resumed, _ = start(bfloat16_recipe(tmp_path / "begun", model__lora=lora), resume=True)
    assert begun.path == resumed.path
    ends = [load_checkpoint(folder.checkpoints) for folder in (whole, resumed)]
    assert ends[0].tensors.keys() == ends[1].tensors.keys()
    for name, tensor in ends[0].tensors.items():
        assert torch.equal(tensor, ends[1].tensors[name]), name
        if name.startswith("parameter/"):
            assert tensor.dtype == torch.float32
    losses = [[r.get("loss/total") for r in folder.read_metrics()] for folder in (whole, resumed)]
    assert losses[0] == losses[1]


def test_the_first_step_of_a_run_in_bfloat16_has_a_ratio_of_one_and_no_distance_to_the_reference(tmp_path):
    folder, _ = start(bfloat16_recipe(tmp_path, train__blocks=1))
    first = next(record for record in folder.read_metrics() if record["step"] == 1)
    assert first["ratio/max"] == 1.0
    assert first["kl_ref/k3_mean"] == 0.0


def test_a_run_in_bfloat16_leaves_its_rounded_masters_as_a_model(tmp_path):
    folder, _ = start(bfloat16_recipe(tmp_path, train__blocks=1))
    held = load_checkpoint(folder.checkpoints).tensors
    exported = load_file(folder.model / "model.safetensors")
    for name, tensor in exported.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, held[f"parameter/{name}"].bfloat16()), name


def test_autocast_beside_bfloat16_weights_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="one dtype of the products"):
        bfloat16_recipe(tmp_path, model__autocast="bfloat16")
