"""One optimizer step: weights from counts, micro-batches through the policy, gradients summed.

    loss = sum over micro-batches of (token_weight * token_loss).sum(), and with a value head
         + coefficient * sum over micro-batches of (value_weight * value_loss).sum(), with a teacher's divergence
         + weight * sum over micro-batches of (token_weight * divergence).sum(), with observations
         + coefficient * sum over micro-batches of -observed_weight * logp.sum() of what tools and environments said
         and of a mixture the load-balancing loss of the step (routing.py)

Weights are made for the whole step before its first forward pass, so that the cut into micro-batches changes memory and
speed alone. Zero-advantage sequences are in no micro-batch, but count in the weights; ``zero_advantage_output`` adds
their log-probs of the scoring pass to the step's metrics.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from logitless.data.packing import Packing, StepPlan
from logitless.distributed.ranks import Ranks
from logitless.errors import InputError
from logitless.models.router import RoutingSums
from logitless.objective.advantage import turn_index
from logitless.objective.diagnostics import step_diagnostics
from logitless.objective.distillation import Distillation, DistillationOutput, distillation_diagnostics
from logitless.objective.inputs import required
from logitless.objective.objective import BlockStatistics, Objective, ObjectiveOutput
from logitless.objective.observations import ObservationOutput, Observations, observation_diagnostics
from logitless.objective.over_ranks import GatherOverRanks, one_rank
from logitless.objective.value import ValueLoss, ValueOutput, value_diagnostics, value_weight
from logitless.objective.weighting import MicroBatchTokenMean, Totals, Weighting
from logitless.train.learn.policy import Policy
from logitless.train.learn.routing import RouterLoss
from logitless.train.learn.teacher import Teacher
from logitless.train.recipe.training import Backend
from logitless.train.record.metrics import Numbers
from logitless.types import LMHead, PackedBatch, PackedInputs, TokenBatch


@dataclass(frozen=True)
class MicroBatch:
    """Sequences of one forward and backward pass.

    Args:
        packed: what the policy reads.
        tokens: the same tokens as the objective reads them, with their weights.
        scores_itself: whether this pass gives ``logp_old`` and ``entropy_old`` too; they are None in ``tokens`` then.
        observed_weight: of each token of ``packed.observed``: one over those of the step on all ranks.
    """

    packed: PackedBatch
    tokens: TokenBatch
    scores_itself: bool = False
    observed_weight: float = 0.0


@dataclass(frozen=True)
class MicroBatchOutput:
    """What one micro-batch adds to the step's loss.

    Args:
        policy: of the objective.
        value: of the value loss; None if the algorithm has none.
        logp_old: [n] of a micro-batch that scores itself, detached; None for others.
        router: its share of the load-balancing loss, or None without one.
        routing: what its routers said, without gradient; empty for a dense model.
        distillation: a teacher's divergence; None if it is no term of the loss.
        observations: the likelihood of what tools and environments said; None if it is no term of the loss.
        kl_sampler: [n] KL(sampler || policy); None without score centering.
    """

    policy: ObjectiveOutput
    value: ValueOutput | None = None
    logp_old: Float[Tensor, "n"] | None = None
    router: Float[Tensor, ""] | None = None
    routing: tuple[RoutingSums, ...] = ()
    distillation: DistillationOutput | None = None
    observations: ObservationOutput | None = None
    kl_sampler: Float[Tensor, "n"] | None = None

    @property
    def loss(self) -> Float[Tensor, ""]:
        """The sum of all, differentiable."""
        further = [each.loss for name in _FURTHER_TERMS if (each := getattr(self, name)) is not None]
        loss = sum(further, self.policy.loss)
        return loss if self.router is None else loss + self.router

    def detached(self) -> "MicroBatchOutput":
        """The same numbers without the graph that leads to them."""
        parts = {name: getattr(self, name) for name in ("policy", *_FURTHER_TERMS)}
        freed: dict[str, Any] = {
            name: replace(each, loss=each.loss.detach()) for name, each in parts.items() if each is not None
        }
        return replace(self, **freed, router=None if self.router is None else self.router.detach())


_FURTHER_TERMS = ("value", "distillation", "observations")
"""Fields of ``MicroBatchOutput`` with terms of the loss beside the objective's, in the order of the sum."""


@dataclass(frozen=True)
class OptimizerStep:
    """The tokens of one optimizer step, whose weights are normalised over the whole step.

    Args:
        packed: all sequences of the block.
        tokens: the same with scores and advantages; with ``value_target`` they get weights of the value loss too.
        plan: the step's sequences in rows, over all ranks; a row may be empty.
        objective: its entropy bonus has weights of its own.
        weighting: how token losses are averaged.
        dropped: one flag a sequence of the block: True for truncated completions whose tokens have weight 0.
        num_steps: of the epoch, for weightings with ``scope="block"``.
    """

    packed: PackedBatch
    tokens: TokenBatch
    plan: StepPlan
    objective: Objective
    weighting: Weighting
    dropped: Sequence[bool]
    num_steps: int = 1
    statistics: BlockStatistics | None = None

    def micro_batches(self, places: Sequence[int] | None = None, *, scores_itself: bool = False) -> list[MicroBatch]:
        """The micro-batches of the step, on the CPU.

        Args:
            places: indices of the plan's rows that this rank reads; None: all.
        """
        packed, tokens, every = self.packed, self.tokens, self.plan.micro_batches
        own = range(len(every)) if places is None else places
        rows = [every[place] for place in own]
        parts = [replace(tokens.take(row), token_weight=self._weights(self.weighting, row)) for row in rows]
        if scores_itself:
            parts = [replace(part, logp_old=None, entropy_old=None) for part in parts]
        bonus = self.objective.entropy_bonus
        further: dict[str, Any] = {}
        if bonus is not None and bonus.scope == "micro_batch":
            further["entropy_weight"] = [self._weights(MicroBatchTokenMean(), row) for row in rows]
        if parts and (tokens.value_target is not None or (bonus is not None and bonus.scope != "micro_batch")):
            # These weights are made of the whole step's tokens.
            whole = tokens.take([s for row in every for s in row])
            whole = replace(whole, token_weight=torch.cat([self._weights(self.weighting, row) for row in every]))
            sizes = [sum(packed.inputs.source_counts[s] for s in row) for row in every]

            def split(of_whole: Tensor) -> list[Tensor]:
                of_rows = torch.split(of_whole, sizes)
                return [of_rows[place] for place in own]

            if bonus is not None and bonus.scope != "micro_batch":
                further["entropy_weight"] = split(self.objective.entropy_weight(whole, block=self.statistics))
            if tokens.value_target is not None:
                further["value_weight"] = split(value_weight(whole))
        weighted = [replace(part, **{name: of[i] for name, of in further.items()}) for i, part in enumerate(parts)]
        said = (
            0 if packed.observed is None else sum(packed.observed.inputs.source_counts[s] for s in self.plan.sequences)
        )
        taken = zip(rows, weighted, strict=True)
        return [MicroBatch(packed.take(row), part, scores_itself, 1 / max(said, 1)) for row, part in taken]

    def zero_advantage_output(
        self, device: torch.device | str = "cpu", ranks: Ranks = Ranks.alone()
    ) -> MicroBatchOutput | None:
        """What zero-advantage sequences add to the step's metrics: loss and gradient 0, log-probs of the scoring pass.

        Returns:
            This rank's part, on ``device``; None if the step has no such sequence.
        """
        if not self.plan.zero_advantage:
            return None
        mine = list(ranks.rows_of(self.plan.zero_advantage))
        part = replace(self.tokens.take(mine), token_weight=self._weights(self.weighting, mine)).to(device)
        logp = required(part.logp_old, "logp_old")
        # The advantage of 0 multiplies it.
        centering = torch.zeros_like(logp) if self.objective.score_centering else None
        with torch.no_grad():
            output = self.objective(logp, part.entropy_old, part, centering=centering, block=self.statistics)
        return MicroBatchOutput(replace(output, grad_logp=torch.zeros_like(output.token_loss)))

    def _weights(self, weighting: Weighting, sequences: Sequence[int]) -> Tensor:
        """The token weights of some sequences under a weighting, with the totals of the step's own."""
        numbers, flags = self._counted(weighting, sequences)
        return weighting(numbers, self._totals, flags, self.tokens.advantage.dtype)

    @cached_property
    def _totals(self) -> Totals:
        spans_block = self.weighting.spans_block
        return replace(
            Totals.of(
                *self._counted(self.weighting, range(self.packed.num_sequences) if spans_block else self.plan.sequences)
            ),
            num_steps=float(self.num_steps) if spans_block else 1.0,
            num_micro_batches=max(1, sum(bool(row) for row in self.plan.micro_batches)),
        )

    def _counted(self, weighting: Weighting, sequences: Sequence[int]) -> tuple[tuple[int, ...], list[bool]]:
        """Trained tokens of each sequence or turn, whichever the weighting counts, and whether it is dropped."""
        counts = self._turns if weighting.counts_turns else [(n,) for n in self.packed.inputs.source_counts]
        of_each = [counts[s] for s in sequences]
        flags = [self.dropped[s] for s, of in zip(sequences, of_each, strict=True) for _ in of]
        return tuple(n for of in of_each for n in of), flags

    @cached_property
    def _turns(self) -> list[tuple[int, ...]]:
        """Numbers of trained tokens of each turn that has some, for each sequence."""
        sequence = self.packed.sequence.cpu()
        sizes = torch.bincount(turn_index(sequence, self.packed.turn.cpu()))
        owner = sequence[sizes.cumsum(0) - sizes].tolist()
        found: list[list[int]] = [[] for _ in range(self.packed.num_sequences)]
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
    seed: int,
    beta: float = 0.0,
    entropy_coefficient: float | None = None,
    statistics: BlockStatistics | None = None,
    value_loss: ValueLoss | None = None,
    observations: Observations | None = None,
    gather: GatherOverRanks = one_rank,
    router_loss: RouterLoss | None = None,
    teacher: Teacher | None = None,
    distillation: Distillation | None = None,
    centering: Callable[[PackedBatch], Callable[[Tensor, LMHead], tuple[Tensor, Tensor]]] | None = None,
) -> list[MicroBatchOutput]:
    """Add the gradient of the step's loss to the parameters' ``.grad``; returns what the step's metrics need.

    Args:
        micro_batches: of ``OptimizerStep``.
        seed: for objectives that choose tokens at random in each micro-batch.
        gather: over ranks, for parts that choose tokens in each micro-batch.
        router_loss: of the step, which knows of every micro-batch but this call's first.
        centering: ``SamplerWeights.centering`` at this step; None without score centering.

    Raises:
        InputError: there is no micro-batch, and so no gradient.
    """
    if not micro_batches:
        raise InputError(
            needed="a step with a scored token", given="none", remedy="Leave out steps whose completions are all empty."
        )
    generator = torch.Generator().manual_seed(seed)

    def trained(batch: MicroBatch) -> MicroBatchOutput:
        tokens = batch.tokens.to(policy.device)
        found = None if teacher is None else teacher.divergences(batch.packed, temperature=temperature, backend=backend)
        centred = None if centering is None else centering(batch.packed)
        with policy.routing() as routing:
            scores = policy.scores(
                batch.packed,
                temperature=temperature,
                backend=backend,
                divergence=found,
                centering=centred,
                observed=observations is not None,
            )
        if batch.scores_itself:
            tokens = replace(tokens, logp_old=scores.logp.detach(), entropy_old=scores.entropy.detach())
        policy_output = objective(
            scores.logp,
            scores.entropy,
            tokens,
            centering=scores.centering,
            beta=beta,
            entropy_coefficient=entropy_coefficient,
            block=statistics,
            gather=gather,
            generator=generator,
        )
        further: dict[str, Any] = {}
        if value_loss is not None:
            further["value"] = value_loss(required(scores.value, "value"), tokens)
        if router_loss is not None:
            further["router"] = router_loss.share(routing)
        if distillation is not None and scores.divergence is not None:
            further["distillation"] = distillation.loss(scores.divergence, tokens, scores.tails)
        if observations is not None:
            further["observations"] = observations(required(scores.observed, "observed"), batch.observed_weight)
        output = MicroBatchOutput(
            policy_output,
            logp_old=scores.logp.detach() if batch.scores_itself else None,
            routing=tuple(each.detach() for each in routing),
            kl_sampler=scores.kl_sampler,
            **further,
        )
        output.loss.backward()  # type: ignore[no-untyped-call]
        return output.detached()

    # A function, so that nothing of a micro-batch's graph lives on: a CUDA graph that the next one captures must find
    # no node of autograd that was made on another stream.
    return [trained(batch) for batch in micro_batches]


def step_numbers(outputs: Sequence[MicroBatchOutput], ranks: Ranks = Ranks.alone()) -> dict[str, Tensor]:
    """The metrics of the whole step, as tensors on the device, so that the host does not wait. A collective."""
    numbers = step_diagnostics([each.policy for each in outputs], gather=ranks.gather)
    terms: dict[str, Callable[..., dict[str, Tensor]]] = {
        "value": value_diagnostics,
        "observations": observation_diagnostics,
        "distillation": distillation_diagnostics,
    }
    for name, diagnostics in terms.items():
        found = [each for output in outputs if (each := getattr(output, name)) is not None]
        if found:
            numbers |= diagnostics(found, gather=ranks.gather)
            loss = torch.stack([each.loss.detach() for each in found]).double().sum()
            numbers["loss/total"] = numbers["loss/total"] + ranks.sum(loss)
    apart = [(each.kl_sampler, each.policy.trained) for each in outputs if each.kl_sampler is not None]
    if apart:
        sums = [torch.stack([torch.where(trained, kl, 0.0).double().sum(), trained.sum()]) for kl, trained in apart]
        total, count = ranks.sum(torch.stack(sums).sum(0))
        numbers["kl_sampler/mean"] = total / count.clamp(min=1)
    return numbers


def on_host(numbers: Mapping[str, Tensor]) -> Numbers:
    """Scalars of one dtype, brought to the host in one transfer."""
    return dict(zip(numbers, torch.stack(list(numbers.values())).tolist(), strict=True))


def saved_by_packing(step: StepPlan, inputs: PackedInputs, packing: Packing) -> Numbers:
    """What a step saved by packing, against reading every sequence in full.

    Example:
        >>> ids = torch.zeros(12, dtype=torch.long)
        >>> inputs = PackedInputs(ids, ids, (4, 4, 4), torch.arange(3), (1, 1, 1), (((0, 3),),) * 3)
        >>> saved = saved_by_packing(StepPlan((0, 1, 2), ((0, 1),), zero_advantage=(2,)), inputs, Packing(8, True, 16))
        >>> saved["optimizer/read_tokens"], saved["saving/zero_advantage_tokens"], saved["saving/shared_tokens"]
        (5, 4, 3)
    """
    unshared = replace(packing, share_prompts=False)
    trained = [s for row in step.micro_batches for s in row]
    read = sum(packing.num_tokens(row, inputs) for row in step.micro_batches)
    full_cost = unshared.cost([*trained, *step.zero_advantage], inputs)
    return {
        "optimizer/read_tokens": read,
        "saving/zero_advantage_sequences": len(step.zero_advantage),
        "saving/zero_advantage_tokens": unshared.num_tokens(step.zero_advantage, inputs),
        "saving/shared_tokens": unshared.num_tokens(trained, inputs) - read,
        "saving/work_fraction": 1 - sum(packing.cost(row, inputs) for row in step.micro_batches) / full_cost,
    }
