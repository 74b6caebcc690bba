"""One optimizer step: weights from counts, micro-batches through the policy, gradients summed.

    loss = sum over micro-batches of (token_weight * token_loss).sum(), and with a value head
         + coefficient * sum over micro-batches of (value_weight * value_loss).sum()
         and of a mixture the load-balancing loss of the step (routing.py)

The weights belong to the step and are made before its first forward pass, so the cut into micro-batches changes memory
and speed and nothing else. Dead sequences are in no micro-batch, and count in the weights as ever;
``zero_advantage_output`` puts what scoring said of them into the step's numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from logitless.data.packing import StepPlan
from logitless.distributed.ranks import Ranks
from logitless.errors import InputError
from logitless.models.router import RoutingSums
from logitless.objective.advantage import turn_index
from logitless.objective.diagnostics import step_diagnostics
from logitless.objective.inputs import required
from logitless.objective.objective import BlockStatistics, Objective, ObjectiveOutput
from logitless.objective.over_ranks import GatherOverRanks, one_rank
from logitless.objective.value import ValueLoss, ValueOutput, value_diagnostics, value_weight
from logitless.objective.weighting import MicroBatchTokenMean, Totals, Weighting
from logitless.train.learn.policy import Policy
from logitless.train.learn.routing import RouterLoss
from logitless.train.recipe.training import Backend
from logitless.train.record.metrics import Numbers
from logitless.types import PackedBatch, TokenBatch


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that go through the backbone together.

    Args:
        packed: what the policy scores.
        tokens: the same tokens as the objective reads them, weights included.
        scores_itself: whether the policy, as it is now, says ``logp_old`` and ``entropy_old``, which are None then.
    """

    packed: PackedBatch
    tokens: TokenBatch
    scores_itself: bool = False

    def to(self, device: torch.device | str) -> "MicroBatch":
        """The same on another device."""
        return replace(self, packed=self.packed.to(device), tokens=self.tokens.to(device))


@dataclass(frozen=True)
class MicroBatchOutput:
    """What one micro-batch adds to the step's loss.

    Args:
        policy: the objective's term.
        value: the value head's, or None where the algorithm has no value loss.
        logp_old: [n] of a micro-batch that scores itself, detached; None for others.
        router: its share of the load-balancing loss, or None without one.
        routing: what its routers said, without gradient; empty for a dense model.
    """

    policy: ObjectiveOutput
    value: ValueOutput | None = None
    logp_old: Float[Tensor, "n"] | None = None
    router: Float[Tensor, ""] | None = None
    routing: tuple[RoutingSums, ...] = ()

    @property
    def loss(self) -> Float[Tensor, ""]:
        """The sum of all, differentiable."""
        loss = self.policy.loss if self.value is None else self.policy.loss + self.value.loss
        return loss if self.router is None else loss + self.router


def step_batch(
    packed: PackedBatch,
    tokens: TokenBatch,
    plan: StepPlan,
    objective: Objective,
    weighting: Weighting,
    *,
    dropped: Sequence[bool],
    num_steps: int,
    statistics: BlockStatistics | None,
    scores_itself: bool = False,
    places: Sequence[int] | None = None,
) -> list[MicroBatch]:
    """The micro-batches of a step with their weights, which sum as the weighting says over the whole step.

    Args:
        packed: every sequence of the block.
        tokens: the same with scores and advantages; with ``value_target`` the value loss gets weights of its own too.
        plan: the step's sequences and how they are cut, over all ranks; a row may be empty.
        objective: its entropy bonus brings weights of its own.
        weighting: of the algorithm.
        dropped: one flag a sequence of the block: truncated completions whose tokens weigh 0.
        num_steps: of the epoch, for weightings with ``scope="block"``.
        statistics: of the block.
        scores_itself: whether the step's own forward pass is to say ``logp_old``.
        places: of the plan's rows that a rank reads; None: all.

    Returns:
        One a row that is read, on the CPU.
    """
    weights = _weights_of(packed, tokens, plan, weighting, dropped=dropped, num_steps=num_steps)
    rows = [plan.micro_batches[place] for place in places] if places is not None else plan.micro_batches
    parts = [replace(tokens.take(row), token_weight=weights(weighting, row)) for row in rows]
    if scores_itself:
        parts = [replace(part, logp_old=None, entropy_old=None) for part in parts]
    bonus = objective.entropy_bonus
    further: dict[str, Any] = {}
    if bonus is not None and bonus.scope == "micro_batch":
        further["entropy_weight"] = [weights(MicroBatchTokenMean(), row) for row in rows]
    if parts and (tokens.value_target is not None or (bonus is not None and bonus.scope != "micro_batch")):
        every = plan.micro_batches  # these weights are made of the whole step's tokens
        whole = tokens.take([s for row in every for s in row])
        whole = replace(whole, token_weight=torch.cat([weights(weighting, row) for row in every]))
        sizes = [sum(packed.inputs.source_counts[s] for s in row) for row in every]

        def split(of_whole: Tensor) -> list[Tensor]:
            of_rows = torch.split(of_whole, sizes)
            return list(of_rows) if places is None else [of_rows[place] for place in places]

        if bonus is not None and bonus.scope != "micro_batch":
            further["entropy_weight"] = split(objective.entropy_weight(whole, block=statistics))
        if tokens.value_target is not None:
            further["value_weight"] = split(value_weight(whole))
    weighted = [replace(part, **{name: of[i] for name, of in further.items()}) for i, part in enumerate(parts)]
    return [MicroBatch(packed.take(row), part, scores_itself) for row, part in zip(rows, weighted, strict=True)]


def zero_advantage_output(
    packed: PackedBatch,
    tokens: TokenBatch,
    plan: StepPlan,
    objective: Objective,
    weighting: Weighting,
    *,
    dropped: Sequence[bool],
    num_steps: int,
    statistics: BlockStatistics | None,
    device: torch.device | str = "cpu",
    ranks: Ranks = Ranks.alone(),
) -> MicroBatchOutput | None:
    """What the step's zero-advantage sequences add to its numbers: loss and gradient 0, the rest as at scoring.

    Args:
        packed, tokens, plan, objective, weighting, dropped, num_steps, statistics: as in ``step_batch``.
        device: of the other outputs.
        ranks: that share them.

    Returns:
        The part of this rank; None where the step leaves out none.
    """
    if not plan.dead:
        return None
    mine = list(ranks.rows_of(plan.dead))
    weights = _weights_of(packed, tokens, plan, weighting, dropped=dropped, num_steps=num_steps)
    part = replace(tokens.take(mine), token_weight=weights(weighting, mine)).to(device)
    with torch.no_grad():
        output = objective(required(part.logp_old, "logp_old"), part.entropy_old, part, block=statistics)
    return MicroBatchOutput(replace(output, grad_logp=torch.zeros_like(output.token_loss)))


def _weights_of(
    packed: PackedBatch,
    tokens: TokenBatch,
    plan: StepPlan,
    weighting: Weighting,
    *,
    dropped: Sequence[bool],
    num_steps: int,
) -> Callable[[Weighting, Sequence[int]], Tensor]:
    """The weights of some sequences of the step under a weighting, normalised as the algorithm's is."""
    counts = packed.inputs.source_counts
    runs = _turn_counts(packed) if weighting.counts_turns else []
    over = range(packed.num_sequences) if weighting.spans_block else plan.sequences

    def counted(each: Weighting, sequences: Sequence[int]) -> tuple[tuple[int, ...], list[bool]]:
        """Trained tokens of what a weighting counts, sequences or turns, and whether each is dropped."""
        of_each = [runs[s] for s in sequences] if each.counts_turns else [counts[s : s + 1] for s in sequences]
        flags = [dropped[s] for s, of in zip(sequences, of_each, strict=True) for _ in of]
        return tuple(n for of in of_each for n in of), flags

    totals = replace(
        Totals.of(*counted(weighting, over)),
        num_steps=float(num_steps) if weighting.spans_block else 1.0,
        num_micro_batches=max(1, sum(bool(row) for row in plan.micro_batches)),
    )

    def weights(each: Weighting, row: Sequence[int]) -> Tensor:
        numbers, flags = counted(each, row)
        return each(numbers, totals, flags, tokens.advantage.dtype)

    return weights


def _turn_counts(packed: PackedBatch) -> list[tuple[int, ...]]:
    """Trained tokens of each turn of each sequence; none for a sequence without any."""
    sequence = packed.sequence.cpu()
    action = turn_index(sequence, packed.turn.cpu())
    sizes = torch.bincount(action)
    owner = sequence[sizes.cumsum(0) - sizes].tolist()
    found: list[list[int]] = [[] for _ in range(packed.num_sequences)]
    for s, size in zip(owner, sizes.tolist(), strict=True):
        found[s].append(size)
    return [tuple(of_turns) for of_turns in found]


def backward(
    policy: Policy,
    objective: Objective,
    micro_batches: Sequence[MicroBatch],
    *,
    temperature: float,
    backend: Backend,
    beta: float,
    entropy_coefficient: float | None,
    statistics: BlockStatistics | None,
    seed: int,
    value_loss: ValueLoss | None = None,
    gather: GatherOverRanks = one_rank,
    router_loss: RouterLoss | None = None,
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
        gather: over ranks, for parts that choose tokens in each micro-batch.
        router_loss: of the step, which knows of every micro-batch but this call's first.

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
        tokens = batch.tokens.to(policy.device)
        with policy.routing() as routing:
            scores = policy.scores(batch.packed, temperature=temperature, backend=backend)
        if batch.scores_itself:
            tokens = replace(tokens, logp_old=scores.logp.detach(), entropy_old=scores.entropy.detach())
        policy_output = objective(
            scores.logp,
            scores.entropy,
            tokens,
            beta=beta,
            entropy_coefficient=entropy_coefficient,
            block=statistics,
            gather=gather,
            generator=generator,
        )
        value_output = None if value_loss is None else value_loss(required(scores.value, "value"), tokens)
        output = MicroBatchOutput(
            policy_output,
            value_output,
            scores.logp.detach() if batch.scores_itself else None,
            None if router_loss is None else router_loss.share(routing),
            tuple(each.detach() for each in routing),
        )
        output.loss.backward()  # type: ignore[no-untyped-call]
        outputs.append(output if output.router is None else replace(output, router=output.router.detach()))
    return outputs


def step_numbers(outputs: Sequence[MicroBatchOutput], ranks: Ranks = Ranks.alone()) -> dict[str, Tensor]:
    """The step's diagnostics, which have the names of ``metrics.py``, on the device, which nobody waits for.

    Args:
        outputs: of this rank.
        ranks: that trained together; every rank gets the numbers of the whole step.
    """
    numbers = step_diagnostics([each.policy for each in outputs], gather=ranks.gather)
    values = [each.value for each in outputs if each.value is not None]
    if values:
        numbers |= value_diagnostics(values, gather=ranks.gather)
        of_values = torch.stack([each.loss.detach() for each in values]).double().sum()
        numbers["loss/total"] = numbers["loss/total"] + ranks.sum(of_values)
    return numbers


def on_host(numbers: Mapping[str, Tensor]) -> Numbers:
    """Scalars of one dtype, brought to the host in one transfer."""
    return dict(zip(numbers, torch.stack(list(numbers.values())).tolist(), strict=True))
