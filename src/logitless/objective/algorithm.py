"""An algorithm as data: the loss, its advantage and its weighting."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from logitless.errors import ConfigurationError
from logitless.objective.advantage import Estimator
from logitless.objective.distillation import Distillation
from logitless.objective.kl_control import KLControl
from logitless.objective.objective import Objective
from logitless.objective.observations import Observations
from logitless.objective.ranges import Level
from logitless.objective.value import ValueLoss
from logitless.objective.weighting import MicroBatchTokenMean, Weighting
from logitless.types import TokenBatch

_PAIR = 2
_FINE_TO_COARSE: tuple[Level, ...] = ("token", "turn", "sequence")


@dataclass(frozen=True)
class Algorithm:
    """A whole algorithm, such as a paper's: loss, advantage, weighting and KL control.

    Args:
        objective: the loss.
        advantage: how rewards become advantages; None if the loss reads none.
        weighting: how token losses are averaged.
        value_loss: of the value head, or None.
        kl_control: the coefficient of the KL; None if the caller chooses it.
        kl_in_reward: whether a KL is subtracted from the rewards instead of being a term of the loss.
        drop_truncated: whether completions cut at their limit are left out of the loss.
        distillation: how a teacher enters the loss and the advantages; None without a teacher.
        observations: the likelihood of what tools and environments say, as a term of the loss; None without it.
        notes: remarks on a translated configuration, for the log.

    Raises:
        ConfigurationError: a loss without the advantage that it reads; values without a value loss, or the reverse;
            advantages that differ between tokens that share a ratio; a KL in two places, or in rewards that the
            advantage does not read; a teacher's advantage for a loss that reads none.

    Example:
        >>> from logitless.objective.presets import ppo
        >>> ppo().advantage.needs_values, ppo().value_loss is not None
        (True, True)
    """

    objective: Objective
    advantage: Estimator | None
    weighting: Weighting
    value_loss: ValueLoss | None = None
    kl_control: KLControl | None = None
    kl_in_reward: bool = False
    drop_truncated: bool = False
    distillation: Distillation | None = None
    observations: Observations | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.advantage is None and self.objective.surrogate.reads_advantage:
            raise ConfigurationError(
                needed=f"an advantage for {self.objective.surrogate.name!r} to read",
                given="none",
                remedy="Set algorithm.advantage: {name: group_standardized}.",
            )
        if self.teacher_in_advantage and not self.objective.surrogate.reads_advantage:
            raise ConfigurationError(
                needed="a surrogate that reads advantages, with teacher.advantage",
                given=repr(self.objective.surrogate.name),
                remedy="Set teacher.divergence in place of teacher.advantage, or another algorithm.preset.",
            )
        self._check_values()
        self._check_kl()
        self._check_shared()

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL is a term of the loss."""
        return self.objective.kl is not None

    @property
    def teacher_in_advantage(self) -> bool:
        """Whether a teacher adds to the advantage of each token."""
        return self.distillation is not None and self.distillation.advantage > 0

    @property
    def learns_from_rewards(self) -> bool:
        """Whether the advantages of rewards are all that there is to learn: it neither imitates nor has a teacher."""
        return self.advantage is not None and self.objective.surrogate.reads_advantage and self.distillation is None

    @property
    def reads_scores(self) -> bool:
        """Whether advantages need a scoring pass of the policy."""
        return self.value_loss is not None or self.reads_squares

    @property
    def reads_squares(self) -> bool:
        """Whether advantages need the sum of the squared probabilities."""
        return self.advantage is not None and self.advantage.reads_scores

    @cached_property
    def silent_without_advantage(self) -> bool:
        """Whether a zero-advantage (or zero-weight) sequence can be skipped by a step that still counts it.

        Example:
            >>> from logitless.objective.presets import algorithm
            >>> algorithm("grpo").silent_without_advantage, algorithm("bnpo").silent_without_advantage
            (True, False)
        """
        depends_on_micro_batch = isinstance(self.weighting, MicroBatchTokenMean)
        uses_kl = self.kl_in_reward or self.kl_control is not None
        return (
            not (depends_on_micro_batch or uses_kl)
            and self.value_loss is None
            and not self.reads_scores
            and self.distillation is None
            and self.observations is None
            and is_silent_without_advantage(self.objective)
        )

    def check_completions(self, completions_per_prompt: int) -> None:
        """Refuse fewer completions a prompt than the advantage compares.

        Raises:
            ConfigurationError: every advantage would be 0.
        """
        fewest = 1 if self.advantage is None else self.advantage.fewest_completions
        if completions_per_prompt < fewest:
            raise ConfigurationError(
                needed=f"at least {'two' if fewest == _PAIR else fewest} completions a prompt for"
                f" {_name(self.advantage)!r}",
                given=f"rollout.completions_per_prompt={completions_per_prompt}",
                remedy="Raise it, or set algorithm.advantage to raw or reinforce_pp.",
            )

    def _check_values(self) -> None:
        needs_values = self.advantage is not None and self.advantage.needs_values
        if needs_values and self.value_loss is None:
            raise ConfigurationError(
                needed=f"a value loss with {_name(self.advantage)}, to train the value head",
                given="none",
                remedy="Set algorithm.value_loss: {coefficient: 0.5, clip: 0.2}, or algorithm.preset: ppo.",
            )
        if self.value_loss is not None and not needs_values:
            raise ConfigurationError(
                needed="an advantage that reads values, with a value loss",
                given=_name(self.advantage),
                remedy="Set algorithm.advantage: {name: gae}, or choose a preset without a value loss.",
            )

    def _check_kl(self) -> None:
        if self.kl_in_loss and self.kl_in_reward:
            raise ConfigurationError(
                needed="the KL in one place", given="one in the loss and one in the reward", remedy="Leave one out."
            )
        if self.kl_control is not None and not (self.kl_in_loss or self.kl_in_reward):
            raise ConfigurationError(
                needed="a KL for kl_control to steer",
                given="none in the loss and none in the reward",
                remedy="Set kl=KLPenalty(...) on the objective, or leave kl_control out.",
            )
        if self.kl_in_reward and (self.advantage is None or not self.advantage.takes_kl):
            raise ConfigurationError(
                needed="an advantage that reads rewards from which a KL can be subtracted",
                given=_name(self.advantage),
                remedy="Set kl.placement: loss.",
            )

    def _check_shared(self) -> None:
        """Refuse advantages that differ between tokens that share a ratio or a loss."""
        if self.advantage is None:
            return
        ratio, surrogate = self.objective.ratio, self.objective.surrogate
        shared = [surrogate.level]
        if surrogate.reads == "any" and ratio.advantages is None:
            shared.append(ratio.level)
        level = "token" if self.teacher_in_advantage else self.advantage.level(kl_in_reward=self.kl_in_reward)
        fine = _FINE_TO_COARSE.index(level)
        if fine < max(_FINE_TO_COARSE.index(level) for level in shared):
            raise ConfigurationError(
                needed=f"tokens that share an advantage under {surrogate.name!r} with ratio {ratio.name!r}",
                given=f"{'teacher' if self.teacher_in_advantage else self.advantage.name}, an advantage a {level}",
                remedy="Use a surrogate of the ratio with algorithm.ratio: {name: token}, or another advantage.",
            )


def is_silent_without_advantage(objective: Objective) -> bool:
    """Whether zero-advantage sequences have no gradient and do not affect other sequences.

    Calls the loss with advantages of 0, and sees whether there is a gradient and whether it gathers tokens of other
    sequences. A KL or an entropy bonus always has a gradient.

    Example:
        >>> from logitless.objective.surrogate import Nll
        >>> is_silent_without_advantage(Objective()), is_silent_without_advantage(Objective(surrogate=Nll()))
        (True, False)
    """
    if objective.kl is not None or objective.entropy_bonus is not None:
        return False
    logp, entropy, batch, generator = _probe()
    gathered: list[Tensor] = []

    def gather(rows: Tensor) -> Tensor:
        gathered.append(rows)
        return rows

    output = objective(
        logp.requires_grad_(),
        entropy,
        batch,
        centering=torch.zeros_like(logp) if objective.score_centering else None,
        block=objective.block_statistics(batch, generator=generator),
        gather=gather,
        generator=generator,
    )
    assert output.grad_logp is not None
    return not gathered and not bool(output.grad_logp.count_nonzero())


def _probe() -> tuple[Tensor, Tensor, TokenBatch, torch.Generator]:
    """Random log-probs, entropies and a batch with advantages of 0, from policies up to 3 nats apart."""
    num_tokens, nats = 256, 3.0
    generator = torch.Generator().manual_seed(0)

    def spread(scale: float) -> Tensor:
        return scale * (2 * torch.rand(num_tokens, generator=generator, dtype=torch.float64) - 1)

    logp_old = spread(nats) - 2 * nats
    token = torch.arange(num_tokens)
    batch = TokenBatch(
        sequence=token // 64,
        num_sequences=num_tokens // 64,
        advantage=torch.zeros(num_tokens, dtype=torch.float64),
        token_weight=torch.ones(num_tokens, dtype=torch.float64),
        logp_old=logp_old,
        logp_sampler=logp_old + spread(0.5),
        logp_ref=logp_old,
        entropy_old=spread(1.0) + 1.0,
        turn=token // 16 % 4,
        lag=token // 8 % 4,
        selected=token % 2 == 0,
    )
    return logp_old + spread(nats), spread(1.0) + 1.0, batch, generator


def _name(advantage: Estimator | None) -> str:
    return "none" if advantage is None else advantage.name
