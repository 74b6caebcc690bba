"""Several autograd functions as a single node of autograd's graph, to save host time.

A row-invariant decoder layer is nine autograd functions. As nine nodes they cost the host more time than launching
their kernels. ``one_node`` runs them without autograd, records which result went into which function, gives autograd a
single node, and runs the recorded functions' backwards in reverse order. Kernels, their order and all results are
bitwise identical.

What the functions save is saved by that node, where hooks on saved tensors (``activations``) see it. Under
``recomputed`` the node saves only its inputs and runs the functions again in its backward.

Tensors must go from one function to the next unchanged: a plain torch operation in between has no gradient. Second
derivatives are refused.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from logitless.float32_sums import add_gradient, sums_in_float32
from logitless.second_derivative import refuse_second_derivative

Function = type[torch.autograd.Function]


class _Recording(threading.local):
    """Per thread: the node that functions are recorded in, and whether nodes save only their inputs."""

    node: "_Node | None" = None
    again: bool = False


_recording = _Recording()


def apply(function: Function, *args: Any) -> Any:
    """``function.apply(*args)``, recorded in the surrounding node if there is one; without gradients only the forward.

    Args:
        function: its backward must accept None for an absent gradient, since no zeros are filled in.
        args: of its forward.
    """
    node = _recording.node
    if node is not None:
        return node.run(function, args)
    if not torch.is_grad_enabled():
        return function.forward(Context(), *args)
    return function.apply(*args)  # type: ignore[no-untyped-call]


def one_node(
    run: Callable[..., tuple[Tensor, ...]], given: Sequence[Tensor], parameters: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """``run(*given)`` as one node.

    Args:
        run: calls ``apply``, and no other operation that is to be differentiated.
        given: the tensors that it is called with.
        parameters: every other tensor that may need a gradient.

    Example:
        >>> class Double(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return 2 * x
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return 2 * grad
        >>> x = torch.ones(1, requires_grad=True)
        >>> (y,) = one_node(lambda x: (apply(Double, apply(Double, x)),), [x])
        >>> y.backward()
        >>> x.grad
        tensor([4.])
    """
    if not torch.is_grad_enabled() or _recording.node is not None:
        return run(*given)
    return _OneNode.apply(run, len(given), *given, *parameters)  # type: ignore[no-untyped-call]


@contextmanager
def recomputed() -> Iterator[None]:
    """Inside, a node saves only its inputs and runs its functions again in its backward; they must be deterministic."""
    # like torch.utils.checkpoint, but without its bookkeeping, which takes the host a millisecond a layer
    before, _recording.again = _recording.again, True
    try:
        yield
    finally:
        _recording.again = before


def gradients_wanted() -> bool:
    """Whether the code that runs now is differentiated, by autograd or by a surrounding node (where autograd is off).

    Example:
        >>> with torch.no_grad():
        ...     gradients_wanted()
        False
    """
    return torch.is_grad_enabled() or _recording.node is not None


def refuse_twice() -> None:
    """Refuse second derivatives; call it in the backward of these functions.

    Raises:
        UnavailableError: the backward runs under ``create_graph=True``.
    """
    refuse_second_derivative(
        "layers", given="row-invariant layers or their attention", remedy="Load the model with its own layers."
    )


class Context:
    """Stands in for autograd's context in a function's forward and backward."""

    saved_tensors: tuple[Tensor | None, ...] = ()
    needs_input_grad: tuple[bool, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Does nothing: an absent gradient is always None."""


class _Node:
    """A record of functions in the order in which they ran. Tensors are numbered, the inputs first."""

    def __init__(self, inputs: Sequence[Tensor], needed: Sequence[bool]) -> None:
        self.numbers = {id(each): i for i, each in enumerate(inputs) if needed[i]}
        self.parameters = [(i, each) for i, each in enumerate(inputs) if needed[i] and type(each) is nn.Parameter]
        self.alive: list[Any] = list(inputs)  # kept alive, so that no two tensors share an id
        self.count = self.num_inputs = len(inputs)
        self.steps: list[tuple[Function, Context, list[int | None], list[int]]] = []
        self.outputs: list[int | None] = []

    def run(self, function: Function, args: tuple[Any, ...]) -> Any:
        """Run a function's forward and record its results."""
        numbers, context, sources = self.numbers, Context(), list[int | None]()
        for each in args:
            source = numbers.get(id(each))
            assert source is not None or not isinstance(each, Tensor) or not each.requires_grad, "an input of the node"
            sources.append(source)
        context.needs_input_grad = tuple([source is not None for source in sources])
        made = function.forward(context, *args)
        if True in context.needs_input_grad:
            outs = made if isinstance(made, tuple) else (made,)
            targets = list(range(self.count, self.count + len(outs)))
            self.count += len(outs)
            self.alive += outs
            numbers.update(zip(map(id, outs), targets, strict=True))
            self.steps.append((function, context, sources, targets))
        return made

    def finish(self, outs: tuple[Tensor, ...]) -> list[Tensor | None]:
        """Drop all references to tensors; returns those that the functions saved, in order."""
        self.outputs = [self.numbers.get(id(each)) for each in outs]
        self.numbers, self.alive = {}, []
        saved: list[Tensor | None] = []
        for _, context, _, _ in self.steps:
            saved += context.saved_tensors
            context.saved_count, context.saved_tensors = len(context.saved_tensors), ()  # type: ignore[attr-defined]
        return saved

    def backward(self, saved: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the inputs; those of parameters with a float32 sum are added to that sum instead."""
        found: list[Tensor | None] = [None] * self.count
        end = len(saved)
        for number, grad in zip(self.outputs, grads, strict=True):
            if number is not None and grad is not None:
                found[number] = _sum(found[number], grad)
        for function, context, sources, targets in reversed(self.steps):
            begin = end - context.saved_count  # type: ignore[attr-defined]
            given = [found[number] for number in targets]
            if any(grad is not None for grad in given):
                context.saved_tensors = tuple(saved[begin:end])
                results = function.backward(context, *given)
                context.saved_tensors = ()
                for source, result in zip(sources, results if isinstance(results, tuple) else (results,), strict=True):
                    if source is not None and result is not None:
                        found[source] = _sum(found[source], result)
            for number in targets:
                found[number] = None
            end = begin
        for number, parameter in self.parameters:
            grad = found[number]
            if grad is not None and grad.dtype == torch.float32 and sums_in_float32(parameter):
                add_gradient(parameter, grad)
                found[number] = None
        return found[: self.num_inputs]


def _sum(before: Tensor | None, more: Tensor) -> Tensor:
    return more if before is None else before + more


def _recorded(
    run: Callable[..., tuple[Tensor, ...]], num_given: int, inputs: Sequence[Tensor], needed: Sequence[bool]
) -> tuple["_Node", tuple[Tensor, ...]]:
    """Run the functions in a new node; returns the node and their results."""
    node = _recording.node = _Node(inputs, needed)
    try:
        return node, run(*inputs[:num_given])
    finally:
        _recording.node = None


class _OneNode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., tuple[Tensor, ...]], num_given: int, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        if _recording.again:
            ctx.again, ctx.parameters = (run, num_given), inputs[num_given:]
            ctx.save_for_backward(*inputs[:num_given])
            return run(*inputs[:num_given])
        ctx.again = None
        ctx.node, outs = _recorded(run, num_given, inputs, ctx.needs_input_grad[2:])
        ctx.save_for_backward(*ctx.node.finish(outs))
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_twice()
        if ctx.again is None:
            return (None, None, *ctx.node.backward(ctx.saved_tensors, grads))
        run, num_given = ctx.again
        inputs = (*ctx.saved_tensors, *ctx.parameters)
        with torch.autocast(inputs[0].device.type, enabled=False):
            node, outs = _recorded(run, num_given, inputs, ctx.needs_input_grad[2:])
        return (None, None, *node.backward(node.finish(outs), grads))
