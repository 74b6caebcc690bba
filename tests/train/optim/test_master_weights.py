"""Float32 master weights: what the optimizer holds, what the model reads, what autograd adds up."""

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from logitless.errors import TrainingError
from logitless.train.optim import fused_adamw, master_weights
from logitless.train.optim.fused_adamw import (
    chunks_of,
    clip_factor,
    cut,
    fused_norm,
    fused_update,
    pieces_of,
    update_from_host,
)
from logitless.train.optim.master_weights import MasterAdamW, lower_to, master_weight
from logitless.train.record.run_folder import RunFolder
from logitless.train.store.checkpoint import load_checkpoint
from logitless.train.store.tensor_files import read_places, write_tensors
from logitless.train.store.training_state import (
    optimizer_tensors,
    parameter_tensors,
    restore_optimizer,
    restore_parameters,
)
from tests.head.interpreter import complete_interpreter, interpreted
from tests.train.fake_driver import FakeDriver
from tests.train.interrupting import stopped_at
from tests.train.tiny import assert_equal, assert_same_run, finished_run, tiny_recipe

BETAS, EPS, RATE, DECAY = (0.9, 0.999), 1e-8, 1e-3, 0.1
NUMBERS = {"rate": RATE, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}


def a_layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(7, 5)


OPTIONS = {"lr": RATE, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}


def optimizer_of(layer: nn.Linear, **options) -> MasterAdamW:
    """AdamW over the master weights of a layer, which it rounds to bfloat16."""
    lower_to(torch.bfloat16, layer.parameters())
    return MasterAdamW([{"params": list(layer.parameters())}], **(OPTIONS | options))


def give_gradients(layer: nn.Linear, number: int) -> None:
    """The same gradients for the same number, whatever the weights' dtype."""
    generator = torch.Generator().manual_seed(number)
    for parameter in layer.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_master_weights_follow_float32_training_bit_for_bit_and_the_model_holds_them_rounded():
    layer, plain = a_layer(), a_layer()
    ours, theirs = optimizer_of(layer), torch.optim.AdamW(plain.parameters(), **OPTIONS)
    for number in range(5):
        give_gradients(layer, number)
        give_gradients(plain, number)
        ours.take_gradients()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for parameter, wanted in zip(layer.parameters(), plain.parameters(), strict=True):
        assert torch.equal(master_weight(parameter), wanted)
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, wanted.bfloat16())


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
    assert master_weight(layer.weight) is layer.weight


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
    assert abs(float(fused_norm(chunks_of(parameters), gradients)) / float(expected) - 1) < 64 * 2**-24
    gradients[2][7] = torch.inf
    assert not torch.isfinite(fused_norm(chunks_of(parameters), gradients))


def test_a_norm_that_is_not_finite_leaves_master_weights_state_and_copies_as_they_are():
    device = where_kernels_run()
    master, copy = nn.Parameter(torch.randn(70, device=device)), torch.ones(70, dtype=torch.bfloat16, device=device)
    held = [master, copy, *(torch.full_like(master, 0.5).detach() for _ in range(2))]
    before = [tensor.detach().clone() for tensor in held]
    columns = [[tensor] for tensor in (master, torch.full_like(master, torch.nan), *held[2:], copy)]
    scale = clip_factor(torch.tensor(torch.nan, device=device), 1.0)
    fused_update(chunks_of([master]), *columns, scale=scale, step=1, **NUMBERS)
    assert all(map(torch.equal, held, before))


@pytest.mark.parametrize("sizes", [(1, 3), (1025, 70000, 64)])
def test_the_fused_update_equals_torch(sizes: tuple[int, ...]):
    device = where_kernels_run()
    ours = [nn.Parameter(torch.randn(n, device=device)) for n in sizes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    moments = [[torch.zeros_like(p) for p in ours] for _ in range(2)]
    copies = [torch.zeros_like(p, dtype=torch.bfloat16).detach() for p in ours]
    reference = torch.optim.AdamW(theirs, **OPTIONS, foreach=False)
    for step in range(1, 4):
        gradients = [torch.randn_like(p) for p in ours]
        scale = torch.full((1,), 0.5, device=device)
        fused_update(chunks_of(ours), ours, gradients, *moments, copies, scale=scale, step=step, **NUMBERS)
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

    def new(self, _: torch.device) -> "Lane":
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
        patch.setattr(fused_adamw, "_Stream", lanes)
        patch.setattr(fused_adamw, "_copy", lanes.later(fused_adamw._copy))
        patch.setattr(fused_adamw, "fused_update", lanes.later(update))
        update_from_host(pieces_of(columns[0], torch.device("cpu")), *columns)
    lanes.finish()
    for column, want in zip(columns, expected, strict=True):
        assert all(map(torch.equal, column, want))


@pytest.mark.parametrize("piece", [4, 16, fused_adamw.PIECE])
@pytest.mark.usefixtures("host_that_kernels_read")
def test_master_weights_on_the_host_are_updated_bitwise_from_the_parameters_gradients(piece, monkeypatch):
    monkeypatch.setattr(fused_adamw, "PIECE", piece)  # a layer of 7 x 5 with its 5 biases: eleven pieces, three, or one
    layers = [a_layer(), a_layer()]
    optimizers = [optimizer_of(layer, on_host=on_host) for layer, on_host in zip(layers, (True, False), strict=True)]
    for step in range(3):
        norms = []
        for layer, optimizer in zip(layers, optimizers, strict=True):
            give_gradients(layer, step)
            optimizer.take_gradients()
            assert (layer.weight.grad is None) == (not optimizer.on_host)
            norm, taken = optimizer.clipped_step(1.0)
            assert taken
            norms.append(norm)
            optimizer.zero_grad()
            assert layer.weight.grad is master_weight(layer.weight).grad is None
        assert torch.equal(*norms)
    for one, other in zip(*(layer.parameters() for layer in layers), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(master_weight(one), master_weight(other))
        states = [optimizer.state[master_weight(p)] for optimizer, p in zip(optimizers, (one, other), strict=True)]
        assert all(torch.equal(states[0][key], states[1][key]) for key in ("step", "exp_avg", "exp_avg_sq"))


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
    give_gradients(layer, 0)
    optimizer.take_gradients()
    optimizer.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(fused_adamw, "fused_update", failing)
        patch.setattr(master_weights, "fused_update", failing)
        with pytest.raises(RuntimeError, match="the second part"):
            optimizer.clipped_step(None)
    assert updated == [1]
    held = [master_weight(parameter).detach().clone() for parameter in layer.parameters()]
    assert not torch.equal(held[0], a_layer().weight)
    assert torch.equal(held[1], a_layer().bias)  # half a step
    for go_on in (lambda: optimizer.clipped_step(None), optimizer.step, optimizer.state_dict):
        with pytest.raises(TrainingError, match=r"master weights and optimizer state of one step.*last checkpoint"):
            go_on()
    assert all(map(torch.equal, held, map(master_weight, layer.parameters())))


def of_a_checkpoint(layer: nn.Linear, optimizer: MasterAdamW) -> dict[str, torch.Tensor]:
    masters = {name: master_weight(p) for name, p in layer.named_parameters()}
    return parameter_tensors(masters) | optimizer_tensors(masters, optimizer)


@pytest.mark.parametrize("restore", ["a checkpoint", "a state dict"])
def test_master_weights_and_state_on_the_host_are_page_locked_also_after_they_were_restored(
    restore, tmp_path, host_that_kernels_read
):
    layers = begun, _, resumed = [a_layer() for _ in range(3)]
    optimizers = [optimizer_of(layer, on_host=True) for layer in layers]

    def step(place: int, number: int) -> None:
        give_gradients(layers[place], number)
        optimizers[place].step()

    step(0, 0)
    if restore == "a checkpoint":
        file = tmp_path / "held.safetensors"
        held = of_a_checkpoint(begun, optimizers[0])
        write_tensors(file, held)
        numbers = sum(place.num_bytes for place in read_places(file).values())
        assert numbers == sum(tensor.nbytes for tensor in held.values())  # and not their pages
        assert file.stat().st_size < numbers + 2000
        masters = {name: master_weight(p) for name, p in resumed.named_parameters()}
        restore_parameters(masters, read := load_file(file))
        restore_optimizer(masters, optimizers[2], read)
    else:
        for parameter, other in zip(resumed.parameters(), begun.parameters(), strict=True):
            master_weight(parameter).data.copy_(master_weight(other))
        optimizers[2].load_state_dict(deepcopy(optimizers[0].state_dict()))
    for place, number in ((1, 0), (1, 1), (2, 1)):
        step(place, number)
    ends = [of_a_checkpoint(layer, optimizer) for layer, optimizer in zip(layers, optimizers, strict=True)]
    assert_equal(ends[1], ends[2])
    for end in ends[1:]:
        assert all(tensor.is_pinned() == (not name.endswith("/step")) for name, tensor in end.items())
    assert len(host_that_kernels_read.locked) == 3 * 2 * 3  # master weight and two moments of two parameters each


def test_memory_of_master_weights_and_state_goes_with_the_optimizer_and_its_layer(host_that_kernels_read):
    optimizer = optimizer_of(layer := a_layer(), on_host=True)
    give_gradients(layer, 0)
    optimizer.step()
    assert len(host_that_kernels_read.locked) == 3 * 2
    del layer, optimizer
    gc.collect()
    assert not host_that_kernels_read.locked


BFLOAT16 = {"model__trained_dtype": "bfloat16", "model__dtype": "bfloat16", "train__blocks": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> RunFolder:
    return finished_run(tmp_path_factory.mktemp("whole"), **BFLOAT16)


def test_a_run_in_bfloat16_resumes_bitwise_from_its_master_weights(whole, tmp_path):
    stopped_at(3, tiny_recipe(tmp_path, **BFLOAT16))
    assert_same_run(whole, finished_run(tmp_path, **BFLOAT16, resume=True))


def test_the_first_step_of_a_run_in_bfloat16_has_a_ratio_of_one_and_no_distance_to_the_reference(whole):
    first = next(record for record in whole.read_metrics() if record["step"] == 1)
    assert (first["ratio/max"], first["kl_ref/k3_mean"]) == (1.0, 0.0)


def test_a_run_in_bfloat16_leaves_its_rounded_master_weights_as_a_model(whole):
    held = load_checkpoint(whole.checkpoints).tensors
    for name, tensor in load_file(whole.model / "model.safetensors").items():
        assert (tensor.dtype, held[f"parameter/{name}"].dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(tensor, held[f"parameter/{name}"].bfloat16()), name
