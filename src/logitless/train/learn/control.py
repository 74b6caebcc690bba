"""Coefficients that change during a run, of the KL and of the entropy bonus, and their controllers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from logitless.objective.algorithm import Algorithm
from logitless.objective.divergence import kl_in_reward
from logitless.objective.entropy import EntropyController
from logitless.objective.inputs import required
from logitless.objective.kl_control import KLController
from logitless.train.recipe.algorithm import KLInLoss, KLInReward
from logitless.train.record.metrics import Numbers
from logitless.types import TokenBatch


class Controllers:
    """The current coefficients, updated after each step or epoch."""

    def __init__(self, kl: KLInLoss | KLInReward | None, algorithm: Algorithm) -> None:
        self._kl_section, self._bonus = kl, (bonus := algorithm.objective.entropy_bonus)
        self._kl = None if algorithm.kl_control is None else KLController(algorithm.kl_control)
        self._entropy = EntropyController(bonus) if bonus is not None and bonus.adaptive else None
        self._kl_of_epoch: list[float] = []

    @property
    def beta_in_loss(self) -> float:
        """Coefficient of the KL in the loss; 0 without one."""
        return self._beta("loss")

    @property
    def beta_in_reward(self) -> float:
        """Coefficient of the KL in the reward; 0 without one."""
        return self._beta("reward")

    @property
    def entropy_coefficient(self) -> float | None:
        """Coefficient of an adaptive entropy bonus; None for a fixed one."""
        return None if self._entropy is None else self._entropy.applied

    @property
    def length_factor(self) -> float:
        """Factor of the next block's ``max_new_tokens``, by the KL guardrail."""
        return 1.0 if self._kl is None else self._kl.rollout_factor

    def after_step(self, record: Numbers, tokens: TokenBatch, sequences: Sequence[int], *, taken: bool) -> None:
        """Add the coefficients of this step to its record, and update the controllers unless it was skipped.

        Args:
            record: metrics of the step, changed in place.
            sequences: that the step read, on all ranks.
        """
        if self._bonus is not None:
            adaptive = self._entropy
            record["entropy/bonus_coefficient"] = self._bonus.coefficient if adaptive is None else adaptive.applied
            if adaptive is not None and taken:
                adaptive.update(record["entropy/bonus_mean"])
        if self._kl_section is None or self._kl is None:
            return
        record["kl_ref/beta"] = self._kl.beta
        if taken:
            record["kl_ref/controlled"] = seen = self._seen(record, tokens, sequences, self._kl_section)
            if math.isfinite(seen):  # else exp has overflowed
                self._kl_of_epoch.append(seen)
                if self._kl_section.update == "step":
                    self._kl.update(seen, len(sequences))
        record["kl_ref/guarded"] = self._kl.num_guarded
        record["kl_ref/bounded"] = self._kl.num_bounded

    def end_epoch(self, num_sequences: int) -> None:
        """Update a controller that moves once an epoch, with the mean over the epoch's steps."""
        section = self._kl_section
        if self._kl is not None and section is not None and section.update == "epoch" and self._kl_of_epoch:
            self._kl.update(sum(self._kl_of_epoch) / len(self._kl_of_epoch), num_sequences)
        self._kl_of_epoch = []

    def state_dict(self) -> dict[str, Any]:
        """All coefficients, as JSON."""
        return {
            "kl": None if self._kl is None else self._kl.state_dict(),
            "entropy": None if self._entropy is None else self._entropy.state_dict(),
            "kl_of_epoch": self._kl_of_epoch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        if self._kl is not None:
            self._kl.load_state_dict(state["kl"])
        if self._entropy is not None:
            self._entropy.load_state_dict(state["entropy"])
        self._kl_of_epoch = list(state["kl_of_epoch"])

    def _beta(self, placement: str) -> float:
        here = self._kl_section is not None and self._kl_section.placement == placement
        return self._kl.beta if here and self._kl is not None else 0.0

    def _seen(self, record: Numbers, tokens: TokenBatch, sequences: Sequence[int], kl: KLInLoss | KLInReward) -> float:
        """The KL that is compared with the target: the step's estimate, or for a KL in the reward that of sampling."""
        if kl.placement == "loss":
            return record[f"kl_ref/{kl.penalty.estimator}_mean"]
        read = tokens.take(sequences)
        return float(kl_in_reward(required(read.logp_old, "logp_old"), required(read.logp_ref, "logp_ref")).mean())
