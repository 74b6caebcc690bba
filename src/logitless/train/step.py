"""One optimizer step: weights from counts, micro-batches through the policy, gradients summed.

    loss = sum over micro-batches of (token_weight * token_loss).sum(), and with a value head
         + coefficient * sum over micro-batches of (value_weight * value_loss).sum()

The weights belong to the step and are made before its first forward pass, so the cut into micro-batches changes memory
and speed and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from logitless.data.packing import StepPlan
from logitless.errors import InputError
from logitless.objective.diagnostics import step_diagnostics
from logitless.objective.inputs import required
from logitless.objective.objective import BlockStatistics, Objective, ObjectiveOutput
from logitless.objective.value import ValueLoss, ValueOutput, value_diagnostics, value_weight
from logitless.objective.weighting import MicroBatchTokenMean, Totals, Weighting
from logitless.train.config import Backend
from logitless.train.metrics import Numbers
from logitless.train.policy import Policy
from logitless.types import TokenBatch


@dataclass(frozen=True)
class MicroBatchOutput:
    """What one micro-batch adds to the step's loss.

    Args:
        policy: the objective's term.
        value: the value head's, or None where the algorithm has no value loss.
    """

    policy: ObjectiveOutput
    value: ValueOutput | None = None

    @property
    def loss(self) -> Float[Tensor, ""]:
        """The sum of both, differentiable."""
        return self.policy.loss if self.value is None else self.policy.loss + self.value.loss


def step_batch(
    block: TokenBatch,
    plan: StepPlan,
    objective: Objective,
    weighting: Weighting,
    *,
    dropped: Sequence[bool],
    num_steps: int,
    statistics: BlockStatistics | None,
) -> list[TokenBatch]:
    """The micro-batches of a step with their weights, which sum as the weighting says over the whole step.

    Args:
        block: scored, with advantages; with ``value_target`` the value loss gets weights of its own too.
        plan: the step's sequences and how they are cut.
        objective: its entropy bonus brings weights of its own.
        weighting: of the algorithm.
        dropped: one flag a sequence of the block: truncated completions whose tokens weigh 0.
        num_steps: of the epoch, for weightings with ``scope="block"``.
        statistics: of the block.

    Returns:
        One batch a micro-batch, on the CPU.
    """
    assert block.inputs is not None
    counts = block.inputs.source_counts
    over = range(block.num_sequences) if weighting.spans_block else plan.sequences
    totals = replace(
        Totals.of(tuple(counts[s] for s in over), [dropped[s] for s in over]),
        num_steps=float(num_steps) if weighting.spans_block else 1.0,
        num_micro_batches=max(1, len(plan.micro_batches)),
    )

    def weights(each: Weighting, row: Sequence[int]) -> Tensor:
        return each(tuple(counts[s] for s in row), totals, [dropped[s] for s in row], block.advantage.dtype)

    parts = [replace(block.take(row), token_weight=weights(weighting, row)) for row in plan.micro_batches]
    bonus, sizes = objective.entropy_bonus, [p.num_tokens for p in parts]
    if not parts or (bonus is None and block.value_target is None):
        return parts
    whole = block.take([s for row in plan.micro_batches for s in row])
    whole = replace(whole, token_weight=torch.cat([p.token_weight for p in parts]))
    further: dict[str, Any] = {}
    if bonus is not None and bonus.scope == "micro_batch":
        further["entropy_weight"] = [weights(MicroBatchTokenMean(), row) for row in plan.micro_batches]
    elif bonus is not None:
        further["entropy_weight"] = torch.split(objective.entropy_weight(whole, block=statistics), sizes)
    if block.value_target is not None:
        further["value_weight"] = torch.split(value_weight(whole), sizes)
    return [replace(part, **{name: of[i] for name, of in further.items()}) for i, part in enumerate(parts)]


def backward(
    policy: Policy,
    objective: Objective,
    micro_batches: Sequence[TokenBatch],
    *,
    temperature: float,
    backend: Backend,
    beta: float,
    entropy_coefficient: float | None,
    statistics: BlockStatistics | None,
    seed: int,
    value_loss: ValueLoss | None = None,
) -> list[MicroBatchOutput]:
    """Add the gradient of the step's loss to the parameters' ``.grad``; what the diagnostics need comes back.

    Args:
        policy: whose parameters get gradients.
        objective: of the algorithm.
        micro_batches: of ``step_batch``.
        temperature: of sampling, which the loss shares.
        backend: of the head.
        beta: coefficient of the KL in the loss.
        entropy_coefficient: of an adaptive entropy bonus.
        statistics: of the block.
        seed: for objectives that choose tokens at random in each micro-batch.
        value_loss: of the algorithm, for a policy with a value head.

    Raises:
        InputError: no micro-batch: a step of sequences without scored tokens has no gradient to take.
    """
    if not micro_batches:
        raise InputError(
            needed="a step with a scored token", given="none", remedy="Leave out steps whose completions are all empty."
        )
    outputs = []
    generator = torch.Generator().manual_seed(seed)
    for batch in micro_batches:
        on_device = batch.to(policy.device)
        scores = policy.scores(on_device, temperature=temperature, backend=backend)
        policy_output = objective(
            scores.logp,
            scores.entropy,
            on_device,
            beta=beta,
            entropy_coefficient=entropy_coefficient,
            block=statistics,
            generator=generator,
        )
        value_output = None if value_loss is None else value_loss(required(scores.value, "value"), on_device)
        outputs.append(MicroBatchOutput(policy_output, value_output))
        outputs[-1].loss.backward()  # type: ignore[no-untyped-call]
    return outputs


def step_metrics(outputs: Sequence[MicroBatchOutput]) -> Numbers:
    """The step's diagnostics, which have the names of ``metrics.py``, brought to the host in one transfer."""
    numbers = step_diagnostics([each.policy for each in outputs])
    values = [each.value for each in outputs if each.value is not None]
    if values:
        numbers |= value_diagnostics(values)
        numbers["loss/total"] = (
            numbers["loss/total"] + torch.stack([each.loss.detach() for each in values]).double().sum()
        )
    on_host = torch.stack(list(numbers.values())).tolist()
    return dict(zip(numbers, on_host, strict=True))
