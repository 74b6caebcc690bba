"""The teacher: a frozen model that scores the policy's tokens, and whose next-token distributions the policy learns."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from logitless.head import token_divergence
from logitless.train.learn.policy import AdaptersOff, Policy
from logitless.train.recipe.teacher import TeacherSection
from logitless.train.recipe.training import Backend
from logitless.types import LMHead, PackedBatch, TokenScores

Divergences: TypeAlias = Callable[[Tensor, LMHead], Float[Tensor, "N"]]
"""(a policy's hidden states [N, D] for the targets of a batch, its head) -> divergence of each token from a teacher."""


class Teacher:
    """A frozen model that the policy learns from.

    Args:
        model: the teacher's own, frozen; or the policy with its adapters off.
        section: of the recipe.
    """

    def __init__(self, model: Policy | AdaptersOff, section: TeacherSection) -> None:
        self.model, self.section = model, section

    def scores(self, batch: PackedBatch, *, temperature: float, backend: Backend) -> TokenScores:
        """logp and entropy [N] of the batch's targets under the teacher.

        Args:
            temperature: of sampling; ``teacher.temperature`` replaces it.
        """
        return self.model.scores(batch, temperature=self._temperature(temperature), backend=backend)

    def divergences(self, batch: PackedBatch, *, temperature: float, backend: Backend) -> Divergences:
        """Read a batch; returns the function that compares the policy's hidden states with what was read.

        It is not called inside ``Policy.routing``, which would count a base model's routers as the policy's.

        Args:
            batch: the policy's, so that packed rows and shared prompts are the same.
            temperature: divides the policy's logits, and the teacher's unless ``teacher.temperature`` is set.
        """
        section = self.section
        assert section.divergence is not None
        with torch.no_grad():
            hidden, head = self.model.hidden_and_head(batch)

        def divergence(of_policy: Tensor, policy_head: LMHead) -> Tensor:
            assert section.divergence is not None
            return token_divergence(
                of_policy,
                policy_head,
                hidden,
                head,
                kind=section.divergence,
                beta=section.beta,
                temperature=temperature,
                teacher_temperature=self._temperature(temperature),
                backend=backend,
                memory_budget=self._policy.memory_budget,
            ).divergence

        return divergence

    def wait(self) -> None:
        """Move the weights to host memory under ``teacher.place: host``; those of a sharded model FSDP2 moves."""
        if self.section.place == "host":
            for parameter in self._policy.model.parameters():
                parameter.data = parameter.data.cpu()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside, weights that wait on the host (``wait``) are on the policy's device."""
        if self.section.place == "device" or self._policy.sharded is not None:
            yield
            return
        waiting = [(parameter, parameter.data) for parameter in self._policy.model.parameters()]
        try:
            for parameter, on_host in waiting:
                parameter.data = on_host.to(self._policy.device)
            yield
        finally:
            for parameter, on_host in waiting:
                parameter.data = on_host

    @property
    def _policy(self) -> Policy:
        return self.model.policy if isinstance(self.model, AdaptersOff) else self.model

    def _temperature(self, of_sampling: float) -> float:
        return of_sampling if self.section.temperature is None else self.section.temperature
