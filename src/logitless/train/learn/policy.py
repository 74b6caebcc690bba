"""A causal language model as the loop sees it: packed tokens in, log-probabilities of the targets out, no logits.

The reference is another ``Policy`` around a frozen copy, or ``AdaptersOff`` under LoRA. Both score through the same
code, the same packing and the same head.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
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
from logitless.models.lora import adapters_off, save_adapters
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
    """Anything that gives the log-probability of a batch's targets."""

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
        share_prompts: read once what sequences of a row begin with alike, where the model's attention can
            (``why_unshared``).

    Attributes:
        shares_prompts: whether it does.
        unshared_because: what the model has that keeps it from it; None where there is nothing, or nobody asked.
        sharded: what FSDP2 made of the model; None while this rank has all weights.
        sequence: ranks that read parts of the same rows; or None.
        all_rows: whether a sharded head scores the rows of all ranks together (``token_scores_of_all``).
        routers: of a mixture of experts; None of a dense model.
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
        """A policy of the same model that reads other settings: the head's memory, and whether prompts are shared.

        Args:
            train: of a recipe.
        """
        other = copy(self)
        other.memory_budget = train.head_memory_budget
        if train.share_prompts and not self.shares_prompts and self.unshared_because is None:
            other.unshared_because = why_unshared(self.model)
        other.shares_prompts = train.share_prompts and other.unshared_because is None
        return other

    def share_prompts_unless(self, reason: str | None) -> None:
        """Settle what ``why_unshared`` says, of a policy that had no weights yet to be asked."""
        if self.shares_prompts and reason is not None:
            self.unshared_because, self.shares_prompts = reason, False

    def graph_short_rows(self) -> None:
        """From now on row-invariant layers that this process has whole on a GPU train short rows by CUDA graphs."""
        installation = getattr(backbone(self.model), "row_invariant", None)
        if installation is not None and self.device.type == "cuda" and self.sharded is None and self.sequence is None:
            installation.graph_short_rows()

    def share_sequences(self, group: ProcessGroup) -> None:
        """From now on every rank of a group reads some tokens of each row, and has the scores of all.

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
        """Cut the model's weights over the ranks of a mesh; master weights become the shards.

        A model in the host's memory goes to the mesh's device by units, so that it is whole there at no time; weights
        on ``meta`` get room there.

        Args:
            mesh: of ``Arrangement.mesh``.
            on_host: shards wait in the host's memory; for a reference.
            made_same: gives all ranks the weights of the first, unit by unit; None where they are equal.
            all_rows: the head scores the rows of all ranks together (``token_scores_of_all``).

        Raises:
            UnavailableError: weights outside of the decoder and its LM head, or frozen ones of another dtype than
                trained ones that have master weights.
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
        """Make all weights whole on this rank, for sampling; they are let go by ``release``. A collective.

        Raises:
            UnavailableError: on every rank, where one of them has no room for all weights.
        """
        if self.sharded is None or self.sharded.is_whole:
            return
        _check_room(self.sharded.whole_bytes, self.device)
        self.sharded.gather()

    def release(self) -> None:
        """Let go of other ranks' weights."""
        if self.sharded is not None:
            self.sharded.release()

    def scores(self, batch: PackedBatch, *, temperature: float, backend: Backend) -> TokenScores:
        """logp, entropy and, with a value head, value [N] of the batch's targets, from one pass of the backbone.

        Differentiable unless called under ``torch.no_grad``.

        Args:
            batch: on the CPU, best; what is read of it is moved to the model's device.
            temperature: divides the logits, as in sampling.
            backend: of the head.
        """
        if not batch.num_tokens:
            if self._is_whole:
                return self._no_scores()
            batch = nothing_to_score()  # other ranks need this one's shards
        inputs = self._read(batch)
        source, target = inputs.source, batch.target
        places = None
        if self.sequence is not None:  # a rank's last row may predict the first token of the next one's
            own = rows_of_rank(len(inputs.input_ids), dist.get_rank(self.sequence), dist.get_world_size(self.sequence))
            places = ((source >= own.start) & (source < own.stop)).nonzero().squeeze(1)
            source, target = source[places] - own.start, target[places.to(target.device)]
        hidden = self._hidden(inputs)
        if isinstance(inputs, SharedInputs):  # the first targets of a group have a row in common
            rows = RepeatedRows.of(source).to(self.device).take(hidden)
        else:
            rows = hidden.index_select(0, sent(source, self.device))
        head = self.head()
        of_all = self.all_rows and is_sharded(head.weight)
        scores = (token_scores_of_all if of_all else token_scores)(
            rows if self.autocast is None else rows.to(self.autocast),
            head,
            sent(target, self.device),
            temperature=temperature,
            backend=backend,
            memory_budget=self.memory_budget,
        )
        if self.value_head is not None:
            scores = replace(scores, value=self.value_head(rows))
        if self.sequence is None or places is None:
            return scores
        columns = [each for each in (scores.logp, scores.entropy, scores.value) if each is not None]
        found = pieced_together(torch.stack(columns, 1), places.to(self.device), batch.num_tokens, self.sequence)
        return TokenScores(*found.unbind(1))

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
        """The LM head, read from the model now: its LoRA factors are absent while adapters are off. No unit of FSDP2
        brings its shards to the device where they wait on the host."""
        head = lm_head(self.model)
        if self.sharded is None or not self.sharded.on_host:
            return head
        others = (head.bias, head.lora_a, head.lora_b)
        bias, lora_a, lora_b = (None if each is None else shards_on(each, self.device) for each in others)
        return replace(head, weight=shards_on(head.weight, self.device), bias=bias, lora_a=lora_a, lora_b=lora_b)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Of the model and, under ``value_head.``, of the value head; some are frozen under LoRA. Shards where it is
        sharded, also while its weights are whole."""
        named = dict(self.model.named_parameters()) if self.sharded is None else dict(self.sharded.parameters)
        if self.value_head is not None:
            named |= {f"value_head.{name}": p for name, p in self.value_head.named_parameters()}
        return named

    def held(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates and checkpoints hold, by the same names: master weights where there are some."""
        return {name: master_weight(p) for name, p in self.named_parameters().items()}

    def round_master_weights(self) -> None:
        """Write master weights that were set from outside, rounded, into the model."""
        round_master_weights(self.named_parameters().values())

    def weights(self) -> Weights:
        """What an engine samples with; the value head is no part of it. Of a sharded model the tensors are made whole
        one after the other, in the dtype of its products, and all ranks read them together."""
        if self.sharded is None:
            return Weights.of(self.model)
        return Weights.of(self.model, dtype=self.sharded.dtype, score=self._score_one)

    def _score_one(self, prompt: Sequence[int], completion: Sequence[int], temperature: float) -> list[float]:
        """The log-probs of one completion; a collective of a sharded model, whose ranks all ask for the same."""
        pair = Prompt("", "", np.asarray(prompt)), Completion("", np.asarray(completion), "", "length")
        with torch.no_grad():
            logp: list[float] = self.scores(pack([pair]), temperature=temperature, backend="auto").logp.tolist()
        return logp

    def whole_state(self, *, keep: bool = True) -> dict[str, Tensor] | None:
        """The weights that ``save`` writes of a sharded model, whole in the host's memory; None where it needs no help.

        A collective: one tensor at a time is whole on a device.

        Args:
            keep: on this rank; the others only take part.
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

        A value head is not part of the language model: ``save_value_head`` writes it to a file of its own.

        Args:
            folder: that need not exist.
            tokenizer: of the model.
            state: of ``whole_state``.
        """
        if self.is_adapter:
            save_adapters(self.model, folder, state)
        else:
            self.model.save_pretrained(str(folder), state_dict=state)  # type: ignore[operator]
        tokenizer.save_pretrained(str(folder))

    def _no_scores(self) -> TokenScores:
        """The scores of a micro-batch without tokens: a rank has such ones where others have more sequences."""
        dtype = logits_dtype(self.head().weight.dtype)
        none = torch.zeros(0, dtype=dtype, device=self.device, requires_grad=torch.is_grad_enabled())
        return TokenScores(none, none, None if self.value_head is None else none)

    def _autocast(self) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast)


class AdaptersOff:
    """The reference of a LoRA policy: the same model without its adapters; no second copy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def scores(self, batch: PackedBatch, *, temperature: float, backend: Backend) -> TokenScores:
        """logp and entropy [N] under the base model, which has no value head."""
        with adapters_off(self.policy.model):
            return replace(self.policy.scores(batch, temperature=temperature, backend=backend), value=None)


def _check_room(needed: int, device: torch.device) -> None:
    """Whether every rank has room for so many bytes, each on its device; a collective.

    Raises:
        UnavailableError: one has not.
    """
    least = torch.tensor([_room(device)], device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    if int(least) < needed:
        raise UnavailableError(
            needed=f"{needed / 2**30:.1f} GiB on each GPU for all weights, which are whole while this process samples",
            given=f"{int(least) / 2**30:.1f} GiB",
            remedy="Sample on servers that divide the weights among their GPUs (rollout.engine: {name: vllm_server}, "
            "started with --tensor-parallel-size): they get one tensor after the other.",
        )


def _room(device: torch.device) -> int:
    """Bytes of a GPU that nobody uses, or that this process uses no more; of a CPU nobody counts them."""
    if device.type != "cuda":
        return torch.iinfo(torch.int64).max
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_allocated(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + torch.cuda.memory_reserved(device) - own, allowed - own)
