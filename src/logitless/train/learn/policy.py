"""The policy: a causal language model that turns packed tokens into log-probabilities of the targets, without logits.

The reference is another ``Policy`` around a frozen copy, or under LoRA ``AdaptersOff``; both score by the same code.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedTokenizerBase

from logitless.data.packing import nothing_to_score, pack
from logitless.data.packing import share_prompts as with_shared_prompts
from logitless.distributed.collectives import pieced_together
from logitless.distributed.sharding import ShardedModel, is_sharded, shards_on, whole
from logitless.errors import UnavailableError
from logitless.head import token_scores
from logitless.head.all_rows import token_scores_of_all
from logitless.head.contract import logits_dtype
from logitless.models.lm_head import (
    backbone,
    backbone_hidden,
    check_sequence_group,
    lm_head,
    rows_of_rank,
    why_unshared,
)
from logitless.models.lora import adapters_off, empty_copy, save_adapters
from logitless.models.modes import evaluating
from logitless.models.repeated_rows import RepeatedRows
from logitless.models.router import Routers, RoutingSums, routing_sums, token_copies
from logitless.models.units import units_of
from logitless.models.value_head import ValueHead
from logitless.rollout.engine import Weights
from logitless.train.optim.master_weights import master_weight, restore_master_weights, round_master_weights
from logitless.train.recipe.training import Backend, TrainSection
from logitless.transfer import sent
from logitless.types import Completion, LMHead, PackedBatch, PackedInputs, Prompt, SharedInputs, TokenScores

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@runtime_checkable
class Scorer(Protocol):
    """Gives log-probabilities of a batch's targets."""

    def scores(self, batch: PackedBatch, *, temperature: float, backend: Backend) -> TokenScores:
        """logp and entropy [N], float32."""
        ...


class Policy:
    """The model that is trained.

    Args:
        model: a transformers causal LM, PEFT-wrapped or not, on its device, dropout off.
        autocast: dtype of the products, or None for those of the weights.
        memory_budget: bytes the head may spend on logits-like blocks; None lets the head choose.
        value_head: predicts returns from the same hidden states, for algorithms with a value loss; or None.
        share_prompts: read shared prefixes of a packed row once, if the model's attention can (``why_unshared``).

    Attributes:
        shares_prompts: whether shared prefixes are read once.
        unshared_because: why the model cannot share prefixes; None if it can, or if ``share_prompts`` is off.
        sharded: the FSDP2 model; None while this rank has all weights.
        sequence: ranks that split the same rows (Ulysses); or None.
        all_rows: whether a sharded head scores the tokens of all ranks together (``token_scores_of_all``).
        routers: of a mixture of experts; None for a dense model.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        autocast: torch.dtype | None = None,
        memory_budget: int | None = None,
        value_head: ValueHead | None = None,
        share_prompts: bool = True,
    ) -> None:
        self.model, self.autocast, self.memory_budget = model, autocast, memory_budget
        self.value_head = value_head
        self.device = next(model.parameters()).device
        self.is_adapter = hasattr(model, "peft_config")
        self.unshared_because = why_unshared(model) if share_prompts else None
        self.shares_prompts = share_prompts and self.unshared_because is None
        self.sharded: ShardedModel | None = None
        self.sequence: ProcessGroup | None = None
        self.all_rows = False
        self.routers = Routers.of(model)
        self._routing: list[RoutingSums] | None = None

    def under(self, train: TrainSection) -> "Policy":
        """A policy of the same model under another section ``train``: the head's memory, and sharing of prompts."""
        other = copy(self)
        other.memory_budget = train.head_memory_budget
        if train.share_prompts and not self.shares_prompts and self.unshared_because is None:
            other.unshared_because = why_unshared(self.model)
        other.shares_prompts = train.share_prompts and other.unshared_because is None
        return other

    def reader(self) -> "Policy":
        """A frozen policy of the same settings, whose model shares what is not trained; its other weights are empty.

        Its empty parameters are given their ``data`` by the caller before a forward pass.
        """
        other = copy(self)
        other.model, other.value_head, other.routers = empty_copy(self.model), None, None
        return other

    def share_prompts_unless(self, reason: str | None) -> None:
        """Switch prompt sharing off for a reason that another rank found; this one may have had no weights to try."""
        if self.shares_prompts and reason is not None:
            self.unshared_because, self.shares_prompts = reason, False

    def graph_short_rows(self) -> None:
        """Train short rows by CUDA graphs from now on, if the layers are row-invariant, whole and on a GPU."""
        installation = getattr(backbone(self.model), "row_invariant", None)
        if installation is not None and self.device.type == "cuda" and self.sharded is None and self.sequence is None:
            installation.graph_short_rows()

    def share_sequences(self, group: ProcessGroup) -> None:
        """Split each row over the ranks of a group from now on; every rank gets the scores of all tokens.

        Raises:
            UnavailableError: see ``check_sequence_group``.
        """
        check_sequence_group(self.model, dist.get_world_size(group))
        self.sequence = group

    def shard(
        self,
        mesh: "DeviceMesh",
        *,
        on_host: bool = False,
        made_same: Callable[[Iterable[Tensor]], None] | None = None,
        all_rows: bool = False,
    ) -> None:
        """Shard the model's weights over the ranks of a mesh; the shards are master weights.

        A model in host memory goes to the device unit by unit, so that it is never whole there. Weights on ``meta`` are
        allocated on the device.

        Args:
            mesh: of ``Arrangement.mesh``.
            on_host: keep the shards in host memory; for a reference.
            made_same: broadcasts the first rank's weights, unit by unit; None if all ranks have the same.
            all_rows: the head scores the tokens of all ranks together (``token_scores_of_all``).

        Raises:
            UnavailableError: the model has weights outside of decoder and LM head, or frozen weights whose dtype is not
                that of trained ones.
        """
        self.all_rows = all_rows
        dtype = restore_master_weights(self.model.parameters())
        others = {p.dtype for p in self.model.parameters() if not p.requires_grad} - {dtype}
        if dtype is not None and others:
            raise UnavailableError(
                needed="one dtype of all weights that are gathered together",
                given=f"trained ones in {dtype} beside frozen ones in {', '.join(map(str, others))}",
                remedy="Set model.dtype and model.trained_dtype alike, or give every process a copy (replicate).",
            )
        self.sharded = ShardedModel(
            self.model, units_of(self.model), mesh, dtype=dtype, on_host=on_host, made_same=made_same
        )
        is_cuda = mesh.device_type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
        if self.value_head is not None:
            if self.value_head.weight.is_meta:
                self.value_head.to_empty(device=self.device)
            self.value_head.to(self.device)
            if made_same is not None:
                made_same(self.value_head.parameters())

    def gather(self) -> None:
        """Gather all weights on this rank, for sampling, until ``release``. A collective.

        Raises:
            UnavailableError: on every rank, if one of them lacks memory for all weights.
        """
        if self.sharded is None or self.sharded.is_whole:
            return
        _check_memory(self.sharded, self.device)
        self.sharded.gather()

    def release(self) -> None:
        """Free the gathered weights of other ranks."""
        if self.sharded is not None:
            self.sharded.release()

    def scores(
        self,
        batch: PackedBatch,
        *,
        temperature: float,
        backend: Backend,
        divergence: Callable[[Tensor, LMHead], tuple[Tensor, Tensor | None]] | None = None,
        centering: Callable[[Tensor, LMHead], tuple[Tensor, Tensor]] | None = None,
        sum_squares: bool = False,
        observed: bool = False,
    ) -> TokenScores:
        """logp, entropy and, with a value head, value [N] of the batch's targets, from one pass of the backbone.

        Differentiable unless called under ``torch.no_grad``.

        Args:
            batch: preferably on the CPU; what is read is moved to the model's device.
            temperature: divides the logits, as in sampling.
            divergence, centering: of the same batch, from ``Teacher`` and ``SamplerWeights``.
            sum_squares: whether the sum of the squared probabilities is wanted, by a second pass of the head.
            observed: whether the log-probs of the batch's ``observed`` tokens are wanted, by another pass of the head,
                so that the others' bits stay the same.
        """
        if not batch.num_tokens:
            if self._is_whole:
                further = {"sum_squares": sum_squares, "divergence": divergence, "observed": observed}
                return self._no_scores({**further, "centering": centering, "kl_sampler": centering})
            batch = nothing_to_score()  # a forward pass all the same: other ranks need this one's shards
            batch = replace(batch, observed=batch)
        inputs = self._read(batch)
        hidden, head = self._hidden(inputs), self.head()
        rows, target, places = self._own(hidden, inputs, batch.target)
        of_head = self._for_head(rows)
        read = partial(self._scored, of_head, head, target, backend)
        scores = read(temperature)
        if sum_squares:
            # At half the temperature logits are doubled: logp = 2 z - log sum exp 2 z, so the sum is exact without a
            # kernel of its own.
            squares = (2 * scores.logp - read(temperature / 2).logp).exp()
            scores = replace(scores, sum_squares=squares)
        if self.value_head is not None:
            scores = replace(scores, value=self.value_head(rows))
        if divergence is not None:
            compared, tails = divergence(of_head, head)
            scores = replace(scores, divergence=compared, tails=tails)
        if centering is not None:
            centred, kl = centering(of_head, head)
            scores = replace(scores, centering=centred, kl_sampler=kl)
        scores = self._of_all_ranks(scores, places, batch.num_tokens)
        if observed and batch.observed is not None:
            rows, target, places = self._own(hidden, self._read(batch.observed), batch.observed.target)
            found = self._scored(self._for_head(rows), head, target, backend, temperature)
            scores = replace(scores, observed=self._of_all_ranks(found, places, batch.observed.num_tokens).logp)
        return scores

    def _own(
        self, hidden: Tensor, inputs: PackedInputs | SharedInputs, target: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden rows and ids of the targets that this rank scores, and their places; None: all of them."""
        source, places = inputs.source, None
        if self.sequence is not None:  # those that its part of the hidden states predicts
            own = rows_of_rank(len(inputs.input_ids), dist.get_rank(self.sequence), dist.get_world_size(self.sequence))
            places = ((source >= own.start) & (source < own.stop)).nonzero().squeeze(1)
            source, target = source[places] - own.start, target[places.to(target.device)]
        return self._rows(hidden, inputs, source), sent(target, self.device), places

    def _scored(self, rows: Tensor, head: LMHead, target: Tensor, backend: Backend, temperature: float) -> TokenScores:
        """logp and entropy of targets from their hidden rows."""
        read = token_scores_of_all if self.all_rows and is_sharded(head.weight) else token_scores
        return read(rows, head, target, temperature=temperature, backend=backend, memory_budget=self.memory_budget)

    def _for_head(self, rows: Tensor) -> Tensor:
        return rows if self.autocast is None else rows.to(self.autocast)

    def _of_all_ranks(self, scores: TokenScores, places: Tensor | None, num_tokens: int) -> TokenScores:
        """The scores of all tokens, from those of this rank's ``places`` where ranks split the rows."""
        if self.sequence is None or places is None:
            return scores
        columns = {name: each for name, each in vars(scores).items() if each is not None}
        own = torch.stack(list(columns.values()), 1)
        found = pieced_together(own, places.to(self.device), num_tokens, self.sequence)
        return TokenScores(**dict(zip(columns, found.unbind(1), strict=True)))

    def hidden_and_head(self, batch: PackedBatch) -> tuple[Tensor, LMHead]:
        """The hidden states [N, D] that predict the batch's targets, and the LM head that reads them.

        Where weights are sharded, all ranks call it, also one whose batch has no target.
        """
        inputs = self._read(batch if batch.num_tokens else nothing_to_score())
        return self._rows(self._hidden(inputs), inputs, inputs.source), self.head()

    def _rows(self, hidden: Tensor, inputs: PackedInputs | SharedInputs, source: Tensor) -> Tensor:
        if isinstance(inputs, SharedInputs):  # the first targets of a group are predicted by the same hidden state
            return RepeatedRows.of(source).to(self.device).take(hidden)
        return hidden.index_select(0, sent(source, self.device))

    @contextmanager
    def routing(self) -> Iterator[list[RoutingSums]]:
        """Inside, a pass adds what its routers said to the list; one of a dense model, or of no token, nothing."""
        self._routing = found = list[RoutingSums]()
        try:
            yield found
        finally:
            self._routing = None

    def routing_of(self, batch: PackedBatch) -> list[RoutingSums]:
        """What the routers say of a batch, without gradient and without a pass of the head."""
        if batch.num_tokens or not self._is_whole:
            with self.routing() as found, torch.no_grad():
                self._hidden(self._read(batch if batch.num_tokens else nothing_to_score()))
            return found
        return []

    @property
    def _is_whole(self) -> bool:
        """Whether this rank needs no other for a pass."""
        return self.sharded is None or self.sharded.is_whole

    def _read(self, batch: PackedBatch) -> PackedInputs | SharedInputs:
        """What the backbone reads of a batch, on the CPU where prompts are shared."""
        return with_shared_prompts(batch.inputs.to("cpu")) if self.shares_prompts else batch.inputs

    def _hidden(self, inputs: PackedInputs | SharedInputs) -> Tensor:
        """Last hidden states of this rank's tokens; notes what the routers said of them where ``routing`` asks."""
        if self._routing is None or self.routers is None:
            with self._autocast():
                return backbone_hidden(self.model, inputs.to(self.device), self.sequence)
        with self._autocast(), self.routers.read() as choices:
            hidden = backbone_hidden(self.model, inputs.to(self.device), self.sequence)
        copies = token_copies(inputs) * bool(len(inputs.source))  # not those of `nothing_to_score`
        if self.sequence is not None:
            own = rows_of_rank(len(copies), dist.get_rank(self.sequence), dist.get_world_size(self.sequence))
            copies = torch.cat([copies, copies.new_zeros(own.stop)])[own]  # filled up by padding
        self._routing.append(routing_sums(choices, sent(copies, self.device)))
        return hidden

    @property
    def hidden_size(self) -> int:
        """D."""
        return self.head().weight.shape[1]

    def head(self) -> LMHead:
        """The LM head in its current state: without LoRA factors while adapters are off.

        FSDP2 does not move the head's shards, so those in host memory are copied to the device here.
        """
        head = lm_head(self.model)
        if self.sharded is None or not self.sharded.on_host:
            return head
        others = (head.bias, head.lora_a, head.lora_b)
        bias, lora_a, lora_b = (None if each is None else shards_on(each, self.device) for each in others)
        return replace(head, weight=shards_on(head.weight, self.device), bias=bias, lora_a=lora_a, lora_b=lora_b)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the model, and of the value head as ``value_head.``; of a sharded model always the shards."""
        named = dict(self.model.named_parameters()) if self.sharded is None else dict(self.sharded.parameters)
        if self.value_head is not None:
            named |= {f"value_head.{name}": p for name, p in self.value_head.named_parameters()}
        return named

    def held(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer updates and checkpoints hold, by the same names: master weights if any."""
        return {name: master_weight(p) for name, p in self.named_parameters().items()}

    def round_master_weights(self) -> None:
        """Round master weights into the model, after they were changed from outside."""
        round_master_weights(self.named_parameters().values())

    def weights(self) -> Weights:
        """The weights for an engine, without the value head.

        Of a sharded model, iterating over them is a collective: one tensor after the other is gathered, in the dtype of
        its products.
        """
        if self.sharded is None:
            return Weights.of(self.model)
        return Weights.of(self.model, dtype=self.sharded.dtype, score=self._score_one)

    def _score_one(self, prompt: Sequence[int], completion: Sequence[int], temperature: float) -> list[float]:
        """The log-probs of one completion; for a sharded model a collective with the same arguments on every rank."""
        pair = Prompt("", "", np.asarray(prompt)), Completion("", np.asarray(completion), "", "length")
        with torch.no_grad():
            logp: list[float] = self.scores(pack([pair]), temperature=temperature, backend="auto").logp.tolist()
        return logp

    def whole_state(self, *, keep: bool = True) -> dict[str, Tensor] | None:
        """The weights of a sharded model for ``save``, gathered in host memory; None for a model that is not sharded.

        A collective; one tensor at a time is whole on a device.
        """
        if self.sharded is None:
            return None
        self.release()
        found: dict[int, Tensor] = {}
        state = {}
        for name, weight in self.model.state_dict(keep_vars=True).items():
            if self.is_adapter and not weight.requires_grad:
                continue
            if id(weight) not in found:  # tied weights stay one
                full = whole(weight.detach())
                if self.sharded.dtype is not None and full.is_floating_point():
                    full = full.to(self.sharded.dtype)
                found[id(weight)] = full.cpu() if keep else full.new_empty(0)
            state[name] = found[id(weight)]
        return state

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase, state: dict[str, Tensor] | None = None) -> None:
        """Write the weights (under LoRA the adapter) and the tokenizer in Hugging Face format, as safetensors.

        ``state`` is that of ``whole_state``. The value head is not written; see ``save_value_head``.
        """
        if self.is_adapter:
            save_adapters(self.model, folder, state)
        else:
            self.model.save_pretrained(str(folder), state_dict=state)  # type: ignore[operator]
        tokenizer.save_pretrained(str(folder))

    def _no_scores(self, further: Mapping[str, object]) -> TokenScores:
        """Scores of an empty micro-batch, which a rank gets if others have more rows.

        Args:
            further: what was asked for, by name of the score; false for what was not.
        """
        dtype = logits_dtype(self.head().weight.dtype)
        none = torch.zeros(0, dtype=dtype, device=self.device, requires_grad=torch.is_grad_enabled())
        names = [name for name, wanted in {"value": self.value_head, **further}.items() if wanted]
        return TokenScores(none, none, **dict.fromkeys(names, none))

    def _autocast(self) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast)


class Itself:
    """The policy as a frozen model that scores: without dropout, and without values."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def scores(self, batch: PackedBatch, *, temperature: float, backend: Backend) -> TokenScores:
        """See ``Policy.scores``."""
        with self._mode():
            return replace(self.policy.scores(batch, temperature=temperature, backend=backend), value=None)

    def hidden_and_head(self, batch: PackedBatch) -> tuple[Tensor, LMHead]:
        """See ``Policy.hidden_and_head``."""
        with self._mode():
            return self.policy.hidden_and_head(batch)

    def _mode(self) -> AbstractContextManager[None]:
        return evaluating(self.policy.model)


class AdaptersOff(Itself):
    """The reference of a LoRA policy: the same model with its adapters off; no second copy."""

    def _mode(self) -> AbstractContextManager[None]:
        return adapters_off(self.policy.model)


def _check_memory(sharded: ShardedModel, device: torch.device) -> None:
    """Refuse if a rank has fewer free bytes on its device than all weights take. A collective.

    Raises:
        UnavailableError: on every rank.
    """
    least, needed = torch.tensor([_free_memory(device)], device=device), sharded.whole_bytes
    for group in sharded.mesh.get_all_groups():  # not all processes: some may only sample
        dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    if int(least) < needed:
        raise UnavailableError(
            needed=f"{needed / 2**30:.1f} GiB on each GPU for all weights, which are whole while this process samples",
            given=f"{int(least) / 2**30:.1f} GiB",
            remedy="Sample on servers that divide the weights among their GPUs (rollout.engine: {name: vllm_server}, "
            "started with --tensor-parallel-size): they get one tensor after the other.",
        )


def _free_memory(device: torch.device) -> int:
    """Bytes of a GPU that this process can allocate; for a CPU no limit."""
    if device.type != "cuda":
        return torch.iinfo(torch.int64).max
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_allocated(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + torch.cuda.memory_reserved(device) - own, allowed - own)
