"""Teachers: models that score the policy's tokens, and whose next-token distributions the policy learns.

A teacher reads the policy's packed rows, or the same completions after a prompt of its own (``TeacherPrompts``). Of
several teachers, each reads the sequences that are its.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from logitless.data.packing import pack
from logitless.distributed.sharding import is_sharded
from logitless.errors import DataError
from logitless.head import token_divergence, truncated_divergence
from logitless.head.contract import logits_dtype, on_device
from logitless.models.lm_head import causal_lm
from logitless.models.loading import positions
from logitless.train.block import PackedBlock
from logitless.train.learn.policy import Itself, Policy
from logitless.train.learn.teacher_prompts import TeacherPrompts, teacher_index
from logitless.train.learn.teacher_server import ServedTeacher
from logitless.train.recipe.teacher import TeacherSection
from logitless.train.recipe.training import Backend
from logitless.types import Group, LMHead, PackedBatch, TokenDivergence, TokenScores, TruncatedDivergence

Model: TypeAlias = Policy | Itself | ServedTeacher
"""One teacher: a model with weights of its own, the policy in one of its modes, or a server's."""

Divergences: TypeAlias = Callable[[Tensor, LMHead], tuple[Float[Tensor, "N"], Float[Tensor, "N 2"] | None]]
"""(a policy's hidden states [N, D] for the targets of a batch, its head) -> divergence of each token from a teacher,
and the ``tails`` of ``TokenScores``."""


class Teacher:
    """One or several models that the policy learns from; they have no gradient.

    Args:
        models: in the order of ``section.sources``.
        prompts: of the teachers; None if they read the policy's.
    """

    def __init__(
        self,
        models: Sequence[Model],
        section: TeacherSection,
        prompts: TeacherPrompts | None = None,
        *,
        memory_budget: int | None = None,
    ) -> None:
        self.models, self.section, self.prompts = tuple(models), section, prompts
        self.memory_budget = memory_budget
        self._heads: dict[Policy, LMHead] = {}

    def attached(self, block: PackedBlock, groups: Sequence[Group]) -> PackedBlock:
        """The block with what its teachers read: which one grades each sequence, and after which prompt.

        Raises:
            DataError: a prompt of the teacher that cannot be made, moves the completion, or is too long.
            LogitlessError: see ``ServedTeacher.check``.
        """
        for model in self.models:
            if isinstance(model, ServedTeacher) and groups:
                model.check(groups[0].prompt)
        if self.prompts is None and isinstance(self.section.source, str):
            return block
        packed = block.packed
        owner = [teacher_index(self.section, group.prompt) for group in groups for _ in group.completions]
        read = None
        if self.prompts is not None:
            prompts = self.prompts(groups)
            pairs = [(g.prompt, completion) for g in groups for completion in g.completions]
            owner = [-1 if prompt is None else each for each, prompt in zip(owner, prompts, strict=True)]
            read = pack([(own or prompt, c) for (prompt, c), own in zip(pairs, prompts, strict=True)]).inputs
            self._check_lengths(read.lengths)
        teacher = torch.tensor(owner, dtype=torch.long)[packed.sequence]
        return replace(block, packed=replace(packed, teacher=teacher, inputs_of_teacher=read))

    def scores(self, batch: PackedBatch, *, temperature: float, backend: Backend) -> TokenScores:
        """logp and entropy [N] of the batch's targets under their teachers; NaN where no teacher grades a token."""
        own = self._temperature(temperature)
        parts = list[tuple[Tensor, TokenScores]]()
        for model, at, part in self._parts(batch):
            with _current(model):
                parts.append((at, model.scores(part, temperature=own, backend=backend)))
        if batch.teacher is None:
            return parts[0][1]
        logp = parts[0][1].logp.new_full((batch.num_tokens,), torch.nan)
        entropy = logp.clone()
        for at, scores in parts:
            places = at.to(logp.device)
            logp[places], entropy[places] = scores.logp.to(logp), scores.entropy.to(logp)
        return TokenScores(logp, entropy)

    def divergences(self, batch: PackedBatch, *, temperature: float, backend: Backend) -> Divergences:
        """Read a batch; returns the function that compares the policy's hidden states with what was read.

        A token that no teacher grades has divergence 0. It is not called inside ``Policy.routing``, which would count
        the routers of a policy that teaches.

        Args:
            batch: the policy's.
            temperature: divides the policy's logits, and the teacher's unless ``teacher.temperature`` is set.
        """
        options: dict[str, Any] = {
            "kind": self.section.divergence,
            "beta": self.section.beta,
            "temperature": temperature,
            "backend": backend,
            "memory_budget": self.memory_budget,
        }

        with torch.no_grad():
            read = [
                (at, part.num_tokens, self._comparison(model, part, self._temperature(temperature), options))
                for model, at, part in self._parts(batch)
                # If weights are sharded, other ranks need this one's part of a pass without tokens too.
                if part.num_tokens or self._is_sharded or isinstance(model, ServedTeacher)
            ]

        def divergence(of_policy: Tensor, policy_head: LMHead) -> tuple[Tensor, Tensor | None]:
            number = logits_dtype(policy_head.weight.dtype)
            whole = torch.zeros(batch.num_tokens, dtype=number, device=of_policy.device)
            tails = None if self.section.top_k is None else whole.new_full((len(whole), 2), torch.nan)
            for places, num_tokens, compare in read:
                if not num_tokens and not is_sharded(policy_head.weight):
                    continue
                at = places.to(of_policy.device)
                found = compare(of_policy if batch.teacher is None else of_policy[at], policy_head)
                whole = found.divergence if batch.teacher is None else whole.index_copy(0, at, found.divergence)
                if isinstance(found, TruncatedDivergence) and tails is not None:
                    tails[... if batch.teacher is None else at] = torch.stack([found.tail, found.tail_teacher], 1)
            return whole, tails

        return divergence

    def _comparison(
        self, model: Model, part: PackedBatch, temperature: float, options: Mapping[str, Any]
    ) -> Callable[[Tensor, LMHead], TokenDivergence | TruncatedDivergence]:
        """Let a model read its part of a batch; returns the function that compares the policy with it."""
        if isinstance(model, ServedTeacher):
            assert self.section.top_k is not None, "by a rule"
            ids, logp = model.top(part, self.section.top_k)
            return lambda hidden, head: truncated_divergence(
                hidden, head, ids.to(hidden.device), logp.to(hidden.device), **options
            )
        with _current(model):
            of_teacher, its_head = model.hidden_and_head(part)
        # Not before it is called: until then the policy runs beside a teacher on another device.
        return lambda hidden, head: token_divergence(
            hidden,
            head,
            of_teacher.to(hidden.device),
            self._head_on(hidden.device, model, its_head),
            teacher_temperature=temperature,
            **options,
        )

    def wait(self) -> None:
        """Move the weights to host memory under ``teacher.place: host``; those of a sharded model FSDP2 moves."""
        if self.section.place == "host":
            for run in _runs(self._parameters()):
                is_cuda, waiting = run[0].is_cuda, _flat(run).cpu()
                # Locked, so that each use copies it at the speed of the bus; made once, as locking takes long.
                _lay(run, waiting.pin_memory() if is_cuda else waiting)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside, weights that wait on the host (``wait``) are on the policy's device."""
        runs = _runs(self._parameters()) if self.section.place == "host" else []
        waiting = [_flat(run) for run in runs]
        try:
            for run, on_host in zip(runs, waiting, strict=True):
                _lay(run, on_host.to(self._policies[0].device, non_blocking=True))
            yield
        finally:
            for run, on_host in zip(runs, waiting, strict=True):
                _lay(run, on_host)

    @property
    def own_models(self) -> dict[str, nn.Module]:
        """The models with weights of their own, by their sources."""
        named = zip(self.section.sources.values(), self.models, strict=True)
        own = self.section.models.values()
        return {source: each.model for source, each in named if source in own and isinstance(each, Policy)}

    def _head_on(self, device: torch.device, model: Policy | Itself, head: LMHead) -> LMHead:
        """The head of a model on the policy's device; of one with a device of its own it is copied there once."""
        if self.section.device is None or not isinstance(model, Policy):
            return head
        if model not in self._heads:
            bias = None if head.bias is None else head.bias.to(device)
            self._heads[model] = replace(head, weight=head.weight.to(device), bias=bias)
        return self._heads[model]

    def _parts(self, batch: PackedBatch) -> Iterator[tuple[Model, Tensor, PackedBatch]]:
        """Each model, the places of the tokens it grades, and those as it reads them; as many on every rank."""
        if batch.teacher is None:
            yield self.models[0], torch.arange(0), batch
            return
        sequence, teacher = batch.sequence.cpu(), batch.teacher.cpu()
        for number, model in enumerate(self.models):
            own = torch.unique(sequence[teacher == number]).tolist()
            yield model, batch.tokens_of(own), batch.as_teacher_reads_it.take(own)

    def _parameters(self) -> Iterator[nn.Parameter]:
        """Of the models with weights of their own that are whole on this rank."""
        for model in dict.fromkeys(self.models):
            if isinstance(model, Policy) and model.sharded is None:
                yield from model.model.parameters()

    @property
    def _is_sharded(self) -> bool:
        return any(each.sharded is not None for each in self._policies)

    @property
    def _policies(self) -> list[Policy]:
        local = [each for each in self.models if not isinstance(each, ServedTeacher)]
        return [each.policy if isinstance(each, Itself) else each for each in local]

    def _check_lengths(self, lengths: Sequence[int]) -> None:
        limits = [positions(causal_lm(each.model).config.get_text_config()) for each in self._policies]
        most = min((limit for limit in limits if limit is not None), default=None)
        if most is not None and max(lengths, default=0) > most:
            raise DataError(
                needed=f"at most {most} tokens, the longest sequence of the teacher's model",
                given=f"{max(lengths)} after a prompt of teacher.template",
                remedy="Shorten what the template inserts, for example by Jinja's `truncate`.",
            )

    def _temperature(self, of_sampling: float) -> float:
        return of_sampling if self.section.temperature is None else self.section.temperature


def _current(model: Model) -> AbstractContextManager[object]:
    """Make the GPU of a model the current one inside, as its kernels need it."""
    return on_device(model.device) if isinstance(model, Policy) else nullcontext()


def _runs(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters that are adjacent in memory, together: row-invariant layers multiply them as one."""
    runs = list[list[nn.Parameter]]()
    for each in sorted(parameters, key=lambda parameter: parameter.data_ptr()):
        last = runs[-1][-1] if runs else None
        follows = (
            last is not None
            and last.dtype == each.dtype
            and last.untyped_storage().data_ptr() == each.untyped_storage().data_ptr()
            and last.data_ptr() + last.nbytes == each.data_ptr()
            and last.is_contiguous()
            and each.is_contiguous()
        )
        if follows:
            runs[-1].append(each)
        else:
            runs.append([each])
    return runs


def _flat(run: Sequence[nn.Parameter]) -> Tensor:
    """The weights of a run as one tensor, which shares their memory."""
    first = run[0].data
    return first if len(run) == 1 else first.as_strided((sum(each.numel() for each in run),), (1,))


def _lay(run: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Give the parameters of a run the memory of ``flat``, which is laid out as ``_flat``."""
    if len(run) == 1:
        run[0].data = flat
        return
    sizes = [each.numel() for each in run]
    for each, part in zip(run, flat.split_with_sizes(sizes), strict=True):
        each.data = part.view(each.shape)
