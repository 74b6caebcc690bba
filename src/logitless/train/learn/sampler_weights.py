"""The weights that sampled what is still to be trained on: a second stream of hidden states, for score centering.

Each version is a copy of the trained weights alone, in the dtype in which they sample. One model reads with any of
them; it shares frozen weights with the policy, so that of an adapter nothing else is held.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from logitless.errors import TrainingError
from logitless.head import score_centering
from logitless.head.contract import logits_dtype
from logitless.objective.inputs import required
from logitless.train.learn.policy import Policy
from logitless.train.recipe.training import Backend
from logitless.types import LMHead, PackedBatch

_PREFIX = "sampler/"


class SamplerWeights:
    """Holds the weights of the newest versions.

    Args:
        policy: that is trained; all of its weights are on this rank.
        place: where the weights wait; those on the host are copied to the device for a step.

    Memory: ``most`` times the trained weights; with ``host`` one version on the device too, while in use.
    """

    def __init__(self, policy: Policy, *, place: Literal["device", "host"], most: int) -> None:
        self._policy, self._place, self._most = policy, place, most
        self._reader = policy.reader()
        both = zip(policy.model.named_parameters(), self._reader.model.parameters(), strict=True)
        self._trained = {name: (own, read) for (name, own), read in both if own.requires_grad}
        self._held: dict[int, dict[str, Tensor]] = {}
        self._loaded: int | None = None

    @property
    def versions(self) -> tuple[int, ...]:
        """That are held, oldest first."""
        return tuple(sorted(self._held))

    def hold(self, version: int) -> None:
        """Copy the policy's weights, before a step changes them, and forget the oldest copies if there are too many."""
        if version in self._held:
            return
        for older in self.versions[: max(0, len(self._held) + 1 - self._most)]:
            del self._held[older]
        self._held[version] = {name: self._waiting(own.detach()) for name, (own, _) in self._trained.items()}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, the weights that were read last stay on the device, for the next micro-batch."""
        try:
            yield
        finally:
            self._loaded = None
            for _, parameter in self._trained.values():
                parameter.data = parameter.data.new_empty(0)

    def centering(
        self, batch: PackedBatch, *, version: int, since: int, temperature: float, backend: Backend
    ) -> Callable[[Tensor, LMHead], tuple[Float[Tensor, "N"], Float[Tensor, "N"]]]:
        """Read a batch with the weights that sampled it; called inside ``in_use``.

        Args:
            batch: with ``lag``.
            version: of the policy.
            since: optimizer steps since the policy from which ``lag`` is counted.

        Returns:
            A function of the policy's hidden states for the targets and its head: ``CenteredScores.centering`` and
            KL(sampler || policy) of each token. Both are 0 for tokens of the policy's own weights, which are not read.

        Raises:
            TrainingError: the weights that sampled a token are gone.
        """
        behind, sequence = required(batch.lag, "lag").cpu() + since, batch.sequence.cpu()
        read = []
        for steps in torch.unique(behind[behind != 0]).tolist():
            # Read in whole sequences, of which only tokens of this version count: in flight others are among them.
            sequences = torch.unique(sequence[behind == steps]).tolist()
            tokens = batch.tokens_of(sequences)
            counted = (behind[tokens] == steps).nonzero().squeeze(1)
            self._load(version - steps)
            with torch.no_grad():
                hidden, head = self._reader.hidden_and_head(batch.take(sequences))
                read.append((tokens[counted], hidden[counted.to(hidden.device)], head.detached()))

        def centering(of_policy: Tensor, policy_head: LMHead) -> tuple[Tensor, Tensor]:
            centred = of_policy.new_zeros(batch.num_tokens, dtype=logits_dtype(of_policy.dtype))
            kl = torch.zeros_like(centred)
            for places, hidden, head in read:
                at = places.to(of_policy.device)
                found = score_centering(
                    of_policy if len(at) == batch.num_tokens else of_policy[at],
                    policy_head,
                    hidden.to(of_policy.dtype),
                    head,
                    temperature=temperature,
                    backend=backend,
                    memory_budget=self._policy.memory_budget,
                )
                centred = centred.index_copy(0, at, found.centering)
                # KL(q || p) = sum_v q_v log q_v - sum_v q_v log p_v, and the second sum is centering - entropy.
                apart = found.entropy - found.centering - found.entropy_sampler
                kl = kl.index_copy(0, at, apart.detach())
            return centred, kl

        return centering

    def tensors(self) -> dict[str, Tensor]:
        """All weights as ``sampler/<version>/<name>``, for a checkpoint; not copied."""
        return {f"{_PREFIX}{v}/{name}": each for v, held in self._held.items() for name, each in held.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold what ``tensors`` gave, in place of everything else; other names are ignored."""
        self._held.clear()
        for name in tensors:
            if name.startswith(_PREFIX):
                version, _, parameter = name.removeprefix(_PREFIX).partition("/")
                waiting = self._waiting(tensors[name].to(self._policy.device))
                self._held.setdefault(int(version), {})[parameter] = waiting

    def _waiting(self, weight: Tensor) -> Tensor:
        """A copy where weights wait."""
        if self._place == "device":
            return weight.clone()
        # Locked, so that each use copies it at the speed of the bus.
        return torch.empty_like(weight, device="cpu", pin_memory=weight.is_cuda).copy_(weight)

    def _load(self, version: int) -> None:
        """Give the reader the weights of a version."""
        if version not in self._held:
            raise TrainingError(
                needed=f"the weights of version {version}, which sampled tokens of this block, for "
                "algorithm.score_centering",
                given=f"the versions {', '.join(map(str, self.versions)) or 'none'}",
                remedy="Go on with the rollout.staleness that the run had.",
            )
        if version != self._loaded:
            for name, (_, parameter) in self._trained.items():
                parameter.data = self._held[version][name].to(self._policy.device, non_blocking=True)
            self._loaded = version
