"""The types that flow between rollout, rewards, packing, head and objective.

Letters: N scored tokens, B sequences (completions), T tokens the backbone reads (prompts included), L tokens of one
prompt or completion, V vocabulary, D hidden size, R LoRA rank. Index t of a tensor of length N belongs to
``target[t]``, predicted from ``source[t]``.

Tokens of prompts and completions are read-only NumPy arrays until packing makes tensors of them; constructors take any
sequence of numbers. Prompts and completions are equal if all their fields are, arrays bit for bit; they have no hash.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int, Int64
from torch import Tensor

from logitless.errors import InputError
from logitless.transfer import sent

Numbers: TypeAlias = np.ndarray | Sequence[Any]
"""What constructors make an array of."""

VerdictStatus = Literal["graded", "ungradable", "error", "timeout", "missing"]
FinishReason = Literal["stop", "length"]
Divergence = Literal["forward_kl", "reverse_kl", "jensen_shannon", "total_variation"]


def read_only(array: np.ndarray) -> np.ndarray:
    """The same array, made read-only; prompts and completions then take it without a copy.

    Example:
        >>> read_only(np.zeros(2)).flags.writeable
        False
    """
    array.setflags(write=False)
    return array


class _WithArrays:
    """Frozen dataclasses with arrays: equality, and fields that are converted to arrays."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_same(value, vars(other)[name]) for name, value in vars(self).items())

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            if value is not None and name in PER_TOKEN:
                value = _array(name, value, PER_TOKEN[name])
            object.__setattr__(self, name, value)


def _array(name: str, given: Numbers, dtype: type[np.generic]) -> np.ndarray:
    """A read-only, contiguous array: ``given`` itself if it is one, else a copy."""
    if isinstance(given, np.ndarray) and given.dtype == dtype:
        flags = given.flags
        if not flags.writeable and flags.c_contiguous and flags.aligned:
            return given
    try:
        return read_only(np.array(given, dtype))
    except (OverflowError, TypeError, ValueError) as error:
        raise InputError(
            needed=f"{name} as numbers of type {dtype.__name__}",
            given=f"{given!r:.100} ({error})",
            remedy="Give one number a token.",
        ) from error


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, np.ndarray) and isinstance(other, np.ndarray):
        return value.tobytes() == other.tobytes()  # a field has one dtype
    if isinstance(value, np.ndarray) or isinstance(other, np.ndarray):
        return False
    return bool(value == other)


@dataclass(frozen=True, eq=False, init=False)
class Prompt(_WithArrays):
    """One prompt.

    Args:
        id: unique within its data set.
        text: what the model reads, after the chat template.
        token_ids: [L] ``text`` tokenized.
        columns: the data row; reward functions read it by name (``answer``, ``kwargs``, ...).
        messages: the conversation before the chat template, if there was one.
        source: name of its data set in a mixture.

    Example:
        >>> Prompt(id="7", text="2+2=", token_ids=(4, 9, 4, 11), columns={"answer": "4"}).columns["answer"]
        '4'
    """

    id: str
    text: str
    token_ids: Int64[np.ndarray, "L"]
    columns: Mapping[str, Any]
    messages: tuple[Mapping[str, str], ...] | None
    source: str

    def __init__(
        self,
        id: str,
        text: str,
        token_ids: Numbers,
        columns: Mapping[str, Any] | None = None,
        messages: tuple[Mapping[str, str], ...] | None = None,
        source: str = "",
    ) -> None:
        columns = {} if columns is None else columns
        self._set(id=id, text=text, token_ids=token_ids, columns=columns, messages=messages, source=source)


PER_TOKEN: dict[str, type[np.generic]] = {
    "token_ids": np.int64,
    "logp_sampler": np.float32,
    "trained": np.bool_,
    "turn": np.int64,
    "entropy_sampler": np.float32,
    "token_versions": np.int64,
    "logp_policy": np.float32,
}
"""Fields of a ``Completion`` with one number a token, and their types."""


@dataclass(frozen=True, eq=False, init=False)
class Completion(_WithArrays):
    """One sampled completion. Per-token fields are None where the engine gives none.

    Args:
        prompt_id: the ``Prompt.id`` it answers.
        token_ids: [L] with the stop token.
        text: decoded up to the stop sequence, without special tokens; this is what rewards read.
        finish_reason: ``stop``, or ``length`` if cut at max_new_tokens.
        logp_sampler: [L] nats, of the distribution sampled from (temperature and filters included).
        trained: [L] False for tokens of a tool or environment; None if all are the policy's.
        turn: [L] non-decreasing id of each token's assistant turn; None for single-turn completions.
        weights_version: of the weights it was sampled with (the oldest of ``token_versions``); None if unknown.
        entropy_sampler: [L] nats, of the softmax at the sampling temperature, before filters and penalties.
        token_versions: [L] version of the weights of each token; None if ``weights_version`` holds for all.
        logp_policy: [L] nats, of the softmax at the sampling temperature, where filters or penalties make
            ``logp_sampler`` differ from it.

    Raises:
        InputError: a per-token field is not numeric, or has another length than ``token_ids``.

    Example:
        >>> Completion("7", token_ids=(4, 2), text="4", finish_reason="stop", logp_sampler=(-0.1, -0.2)).length
        2
    """

    prompt_id: str
    token_ids: Int64[np.ndarray, "L"]
    text: str
    finish_reason: FinishReason
    logp_sampler: Float32[np.ndarray, "L"] | None
    trained: Bool[np.ndarray, "L"] | None
    turn: Int64[np.ndarray, "L"] | None
    weights_version: int | None
    entropy_sampler: Float32[np.ndarray, "L"] | None
    token_versions: Int64[np.ndarray, "L"] | None
    logp_policy: Float32[np.ndarray, "L"] | None

    def __init__(
        self,
        prompt_id: str,
        token_ids: Numbers,
        text: str,
        finish_reason: FinishReason,
        logp_sampler: Numbers | None = None,
        trained: Numbers | None = None,
        turn: Numbers | None = None,
        weights_version: int | None = None,
        entropy_sampler: Numbers | None = None,
        token_versions: Numbers | None = None,
        logp_policy: Numbers | None = None,
    ) -> None:
        self._set(
            prompt_id=prompt_id,
            token_ids=token_ids,
            text=text,
            finish_reason=finish_reason,
            logp_sampler=logp_sampler,
            trained=trained,
            turn=turn,
            weights_version=weights_version,
            entropy_sampler=entropy_sampler,
            token_versions=token_versions,
            logp_policy=logp_policy,
        )
        for name in PER_TOKEN:
            value = getattr(self, name)
            if value is not None and len(value) != len(self.token_ids):
                raise InputError(
                    needed=f"one {name} per token ({len(self.token_ids)})",
                    given=f"{len(value)}",
                    remedy="Give a value for every token id, or None.",
                )

    def as_json(self, array: Callable[[np.ndarray], Any] = np.ndarray.tolist) -> dict[str, Any]:
        """The fields by name; ``array`` converts arrays, by default to lists."""
        return {name: array(value) if isinstance(value, np.ndarray) else value for name, value in vars(self).items()}

    @classmethod
    def of_json(cls, fields: Mapping[str, Any], array: Callable[[Any], Any] = np.asarray) -> "Completion":
        """The completion of ``as_json``; ``array`` converts back, called in the same order."""
        return cls(**{k: array(v) if k in PER_TOKEN and v is not None else v for k, v in fields.items()})

    @property
    def length(self) -> int:
        """Number of tokens, with the stop token."""
        return len(self.token_ids)

    @property
    def num_turns(self) -> int:
        """Assistant turns."""
        return 1 if self.turn is None else 1 + int(self.turn.max(initial=0))


@dataclass(frozen=True)
class Episode:
    """One finished conversation with an environment.

    Args:
        completion: every token after the prompt, those of the environment with ``trained=False``; ``text`` is that of
            the last assistant turn.
        messages: the conversation, prompt included.
        turn_rewards: the environment's reward of each assistant turn, or empty.
        failure: why the environment failed, if it did; the episode then has no reward.

    Raises:
        InputError: rewards for another number of turns than the completion has.

    Example:
        >>> answer = Completion(prompt_id="7", token_ids=(4,), text="4", finish_reason="stop")
        >>> Episode(answer, ({"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"})).num_turns
        1
    """

    completion: Completion
    messages: tuple[Mapping[str, Any], ...]
    turn_rewards: tuple[float, ...] = ()
    failure: str = ""

    def __post_init__(self) -> None:
        if self.turn_rewards and len(self.turn_rewards) != self.num_turns:
            raise InputError(
                needed=f"one reward for each of {self.num_turns} turns, or none",
                given=str(len(self.turn_rewards)),
                remedy="Give 0 for a turn that pays nothing.",
            )

    @property
    def num_turns(self) -> int:
        """Assistant turns."""
        return self.completion.num_turns


@dataclass(frozen=True)
class Verdict:
    """A reward function's result for one completion.

    Args:
        score: finite exactly when ``status`` is ``graded`` or ``ungradable``.
        status: ``graded``; ``ungradable`` (the completion made its own grading fail, by time, memory, size or by ending
            the grader; it scores like a wrong answer); ``error`` (the grader raised or gave nonsense); ``timeout`` (the
            grader waited, or was not scheduled); ``missing`` (cannot be scored here).
        detail: (constraint id, satisfied) in the prompt's order; ids may repeat.
        message: why it was not graded.
        traceback: of the grader, if it raised.

    Raises:
        InputError: score and status do not fit together.

    Example:
        >>> Verdict.graded(0.5, detail=(("punctuation:no_comma", True), ("startend:quotation", False))).score
        0.5
        >>> Verdict(score=0.0, status="ungradable", message="timeout: over 2 s").score
        0.0
        >>> Verdict(score=None, status="timeout", message="over 2 s").status
        'timeout'
    """

    score: float | None
    status: VerdictStatus
    detail: tuple[tuple[str, bool], ...] = ()
    message: str = ""
    traceback: str = ""

    def __post_init__(self) -> None:
        finite = self.score is not None and abs(self.score) < float("inf")
        if finite != (self.status in ("graded", "ungradable")) or (self.score is not None and not finite):
            raise InputError(
                needed="a finite score exactly when the status is 'graded' or 'ungradable'",
                given=f"score={self.score}, status={self.status!r}",
                remedy="Use Verdict.graded(score), or score=None with another status.",
            )

    @property
    def failed(self) -> bool:
        """Whether the grader failed without the completion causing it: ``error`` or ``timeout``."""
        return self.status in ("error", "timeout")

    @classmethod
    def graded(cls, score: float, detail: Sequence[tuple[str, bool]] = ()) -> "Verdict":
        """A verdict with a score."""
        return cls(score=float(score), status="graded", detail=tuple(detail))


@dataclass(frozen=True)
class Group:
    """The G completions of one prompt and their rewards.

    Args:
        prompt: the prompt.
        completions: G completions of it.
        verdicts: for each completion, reward name -> Verdict.
        rewards: the weighted sum for each completion, turn rewards included; None if no function scored it.
        turn_rewards: the environment's part of ``rewards``, by turn; empty if it pays none.
        conversations: the messages of each completion, prompt included; empty if all are single turns.
        baseline: the reward of a greedy completion of the prompt; None if none was sampled, or if it has none.

    Example:
        >>> prompt = Prompt(id="7", text="2+2=", token_ids=(4,))
        >>> answer = Completion(prompt_id="7", token_ids=(4,), text="4", finish_reason="stop")
        >>> Group(prompt, (answer,), ({"exact": Verdict.graded(1.0)},), (1.0,)).rewards
        (1.0,)
    """

    prompt: Prompt
    completions: tuple[Completion, ...]
    verdicts: tuple[Mapping[str, Verdict], ...]
    rewards: tuple[float | None, ...]
    turn_rewards: tuple[tuple[float, ...], ...] = ()
    conversations: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    baseline: float | None = None

    def __post_init__(self) -> None:
        if not len(self.completions) == len(self.verdicts) == len(self.rewards):
            raise InputError(
                needed="equally many completions, verdict mappings and rewards",
                given=f"{len(self.completions)}, {len(self.verdicts)} and {len(self.rewards)}",
                remedy="Give a verdict and a reward (None if unscorable) for every completion.",
            )
        for name in ("turn_rewards", "conversations"):
            given = len(getattr(self, name))
            if given not in (0, len(self.completions)):
                raise InputError(
                    needed=f"{name} of each of {len(self.completions)} completions, or none",
                    given=str(given),
                    remedy="Give one for every completion; it may be empty.",
                )
        strays = {c.prompt_id for c in self.completions} - {self.prompt.id}
        if strays:
            raise InputError(
                needed=f"completions of prompt {self.prompt.id!r}",
                given=f"completions of {sorted(strays)}",
                remedy="Group completions by prompt_id.",
            )


@dataclass(frozen=True)
class PackedInputs:
    """B sequences end to end, without padding: the backbone's input.

    Args:
        input_ids: [T] prompts and completions.
        position_ids: [T] from 0 in every sequence.
        lengths: tokens of each sequence; B numbers that sum to T, on the host.
        source: [N] index into T of the hidden row that predicts each target; increasing.
        source_counts: B numbers that sum to N: scored tokens of each sequence, on the host.
        prefixes: for each sequence its shared prefixes as (id, length), shortest first; None if unknown. Sequences with
            one id begin with the same tokens.

    Example:
        >>> ids = torch.tensor([5, 6, 7, 5, 8])
        >>> PackedInputs(ids, torch.tensor([0, 1, 2, 0, 1]), (3, 2), torch.tensor([0, 1, 3]), (2, 1)).lengths
        (3, 2)
    """

    input_ids: Int[Tensor, "T"]
    position_ids: Int[Tensor, "T"]
    lengths: tuple[int, ...]
    source: Int[Tensor, "N"]
    source_counts: tuple[int, ...]
    prefixes: tuple[tuple[tuple[int, int], ...], ...] | None = None

    def to(self, device: torch.device | str) -> "PackedInputs":
        """A copy on another device."""
        return replace(self, **_moved(self, device))

    def take(self, sequences: Sequence[int]) -> "PackedInputs":
        """These sequences, in this order."""
        device, chosen = self.input_ids.device, torch.tensor(sequences, dtype=torch.long)
        read = _ranges(self.lengths, sequences).to(device)
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        taken: dict[str, Any] = {
            name: tuple(value[s] for s in sequences) if isinstance(value, tuple) else value[read]
            for name, value in values.items()
            if name != "source" and value is not None
        }
        starts = torch.cumsum(torch.tensor([0, *self.lengths]), 0)[chosen]
        new_starts = torch.cumsum(torch.tensor([0, *taken["lengths"]]), 0)[:-1]
        shift = torch.repeat_interleave(new_starts - starts, torch.tensor(taken["source_counts"], dtype=torch.long))
        scored = _ranges(self.source_counts, sequences).to(device)
        return PackedInputs(**taken, source=self.source[scored] + shift.to(device))


class PromptGroup(NamedTuple):
    """Lengths of a shared prefix and of what follows it in a packed row, as a tree.

    A completion is its number of tokens, or again a ``PromptGroup`` where several begin with the same tokens. Without
    completions the prompt is a whole sequence; with a prompt of 0 tokens the completions share nothing.

    Example:
        >>> group = PromptGroup(3, (2, PromptGroup(4, (1, 2))))
        >>> group.size, group.longest
        (12, 9)
    """

    prompt: int
    completions: "tuple[int | PromptGroup, ...]" = ()

    @property
    def branches(self) -> "tuple[PromptGroup, ...]":
        """The completions as groups."""
        return tuple(PromptGroup(each) if isinstance(each, int) else each for each in self.completions)

    @property
    def size(self) -> int:
        """Number of tokens, shared ones counted once."""
        return self.prompt + sum(each.size for each in self.branches)

    @property
    def longest(self) -> int:
        """Length of the longest sequence."""
        return self.prompt + max((each.longest for each in self.branches), default=0)

    @property
    def least(self) -> int:
        """The smallest length in the tree."""
        return min([self.prompt, *(each.least for each in self.branches)])


@dataclass(frozen=True)
class SharedInputs:
    """Packed sequences whose shared prefixes are stored once, each before all that continues it.

    Args:
        input_ids: [T].
        position_ids: [T] in each token's own sequence.
        groups: in the order of the tokens; on the host.
        source: [N] index into T of the hidden row that predicts each target; several targets may share one.

    Example:
        >>> ids = torch.tensor([5, 6, 7, 8])  # prompt 5 6, then 7, or 8
        >>> SharedInputs(ids, torch.tensor([0, 1, 2, 2]), (PromptGroup(2, (1, 1)),), torch.tensor([1, 2, 1, 3])).longest
        3
    """

    input_ids: Int[Tensor, "T"]
    position_ids: Int[Tensor, "T"]
    groups: tuple[PromptGroup, ...]
    source: Int[Tensor, "N"]

    @property
    def longest(self) -> int:
        """Length of the longest sequence, prompt included."""
        return max(group.longest for group in self.groups)

    def to(self, device: torch.device | str) -> "SharedInputs":
        """A copy on another device."""
        return replace(self, **_moved(self, device))


@dataclass(frozen=True)
class PackedBatch:
    """The sampled tokens of B packed sequences, before scoring.

    Args:
        inputs: what the backbone reads.
        target: [N] vocabulary ids of the sampled tokens.
        turn: [N] turn ids, non-decreasing inside a sequence, from 0.
        logp_sampler: [N] nats, float32; NaN where the engine gave none.
        lag: [N] optimizer steps by which the sampling weights are behind the policy, 0 if unknown; or None.
        teacher: [N] which teacher grades each token, the same for all of a sequence, -1 for none; None: the only one.
        inputs_of_teacher: the same sequences after the teacher's prompts; None if it reads the policy's.
        observed: the same sequences, with the tokens that a tool or environment wrote as targets; None where no term of
            the loss reads them.

    Raises:
        InputError: a vector of another length than ``inputs.source``, or sequences of other lengths for the teacher.

    Example:
        >>> ids = torch.tensor([5, 6, 7, 5, 8])
        >>> inputs = PackedInputs(ids, torch.tensor([0, 1, 2, 0, 1]), (3, 2), torch.tensor([0, 1, 3]), (2, 1))
        >>> batch = PackedBatch(inputs, torch.tensor([6, 7, 8]), torch.zeros(3, dtype=torch.long), torch.zeros(3))
        >>> batch.sequence, batch.take([1]).target
        (tensor([0, 0, 1]), tensor([8]))
    """

    inputs: PackedInputs
    target: Int[Tensor, "N"]
    turn: Int[Tensor, "N"]
    logp_sampler: Float[Tensor, "N"]
    lag: Int[Tensor, "N"] | None = None
    teacher: Int[Tensor, "N"] | None = None
    inputs_of_teacher: PackedInputs | None = None
    observed: "PackedBatch | None" = None

    def __post_init__(self) -> None:
        _check_lengths(self, len(self.inputs.source), "inputs.source")
        read = self.inputs_of_teacher
        if read is not None and read.source_counts != self.inputs.source_counts:
            raise InputError(
                needed=f"{self.inputs.source_counts} scored tokens of each sequence, for the teacher too",
                given=str(read.source_counts),
                remedy="Give the teacher the same completions.",
            )

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.target)

    @property
    def num_sequences(self) -> int:
        """B, sequences without a scored token included."""
        return len(self.inputs.lengths)

    @property
    def sequence(self) -> Int[Tensor, "N"]:
        """[N] the sequence of each token, non-decreasing ids in ``range(num_sequences)``."""
        counts = torch.tensor(self.inputs.source_counts, dtype=torch.long)
        return torch.repeat_interleave(torch.arange(self.num_sequences), counts).to(self.target.device)

    def to(self, device: torch.device | str) -> "PackedBatch":
        """A copy on another device."""
        read = None if self.inputs_of_teacher is None else self.inputs_of_teacher.to(device)
        observed = None if self.observed is None else self.observed.to(device)
        moved = _moved(self, device)
        return replace(self, **moved, inputs=self.inputs.to(device), inputs_of_teacher=read, observed=observed)

    def tokens_of(self, sequences: Sequence[int]) -> Int[Tensor, "K"]:
        """Indices of the tokens of these sequences, one sequence after the other; on the CPU."""
        return _ranges(self.inputs.source_counts, sequences)

    def take(self, sequences: Sequence[int]) -> "PackedBatch":
        """These sequences, in this order, renumbered from 0."""
        tokens = self.tokens_of(sequences).to(self.target.device)
        taken: dict[str, Any] = {name: value[tokens] for name, value in _tensors(self).items()}
        read = None if self.inputs_of_teacher is None else self.inputs_of_teacher.take(sequences)
        observed = None if self.observed is None else self.observed.take(sequences)
        return replace(self, **taken, inputs=self.inputs.take(sequences), inputs_of_teacher=read, observed=observed)

    @property
    def as_teacher_reads_it(self) -> "PackedBatch":
        """The same completions after the teacher's prompts."""
        return (
            self
            if self.inputs_of_teacher is None
            else replace(self, inputs=self.inputs_of_teacher, inputs_of_teacher=None)
        )


@dataclass(frozen=True)
class TokenBatch:
    """Scored tokens of B sequences: everything an objective needs besides ``logp`` and ``entropy``.

    Four policies: ``logp`` (being trained; not stored here), ``logp_old`` (the trainer's weights when the batch was
    sampled), ``logp_sampler`` (the engine), ``logp_ref`` (frozen). Nats, float32 or float64.

    Args:
        sequence: [N] non-decreasing ids in ``range(num_sequences)``.
        num_sequences: B, sequences without a scored token included.
        advantage: [N].
        token_weight: [N] (see ``objective.weighting``); ``loss = (token_weight * token_loss).sum()``.
        logp_old, logp_sampler, logp_ref: [N] or None.
        entropy_old: [N] of the scoring pass, or None.
        turn: [N] non-decreasing turn ids inside a sequence, or None.
        lag: [N] optimizer steps between the sampling weights and those of ``logp_old``, or None.
        value_old: [N] values of the scoring pass (PPO), or None.
        value_target: [N] returns for the value head (PPO), NaN where there is none; or None.
        entropy_weight, value_weight: [N] weights of the entropy bonus and the value loss, or None.
        selected: [N] tokens that a covariance loss selected in the scoring pass, or None.

    Raises:
        InputError: a vector of another length, or sequence ids out of order or range (checked on the CPU only).

    Example:
        >>> batch = TokenBatch(
        ...     sequence=torch.tensor([0, 0, 2]), num_sequences=3,
        ...     advantage=torch.tensor([1.0, 1.0, -1.0]), token_weight=torch.full((3,), 1 / 3))
        >>> batch.num_tokens
        3
        >>> batch.take([2]).sequence
        tensor([0])
    """

    sequence: Int[Tensor, "N"]
    num_sequences: int
    advantage: Float[Tensor, "N"]
    token_weight: Float[Tensor, "N"]
    logp_old: Float[Tensor, "N"] | None = None
    logp_sampler: Float[Tensor, "N"] | None = None
    logp_ref: Float[Tensor, "N"] | None = None
    entropy_old: Float[Tensor, "N"] | None = None
    turn: Int[Tensor, "N"] | None = None
    value_old: Float[Tensor, "N"] | None = None
    value_target: Float[Tensor, "N"] | None = None
    entropy_weight: Float[Tensor, "N"] | None = None
    value_weight: Float[Tensor, "N"] | None = None
    selected: Bool[Tensor, "N"] | None = None
    lag: Int[Tensor, "N"] | None = None

    def __post_init__(self) -> None:
        _check_lengths(self, self.num_tokens, "sequence")
        if self.sequence.device.type == "cpu" and self.num_tokens:
            if bool((self.sequence[1:] < self.sequence[:-1]).any()):
                raise InputError(
                    needed="sequence ids that never decrease",
                    given="a decreasing id",
                    remedy="Order the tokens by their sequence.",
                )
            if int(self.sequence[0]) < 0 or int(self.sequence[-1]) >= self.num_sequences:
                raise InputError(
                    needed=f"sequence ids in range({self.num_sequences})",
                    given=f"{int(self.sequence[0])} to {int(self.sequence[-1])}",
                    remedy="Count every sequence in num_sequences, also those without scored tokens.",
                )

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.sequence)

    def to(self, device: torch.device | str) -> "TokenBatch":
        """A copy on another device."""
        return replace(self, **_moved(self, device))

    def take(self, sequences: Sequence[int]) -> "TokenBatch":
        """These sequences, in this order, renumbered from 0; ``token_weight`` is kept. Synchronizes with a GPU."""
        counts = torch.bincount(self.sequence, minlength=self.num_sequences).tolist()
        device = self.sequence.device
        tokens = _ranges(counts, sequences).to(device)
        taken: dict[str, Any] = {name: value[tokens] for name, value in _tensors(self).items()}
        kept = torch.tensor([counts[s] for s in sequences], dtype=torch.long)
        taken["sequence"] = torch.repeat_interleave(torch.arange(len(sequences)), kept).to(device)
        return replace(self, **taken, num_sequences=len(sequences))


@dataclass(frozen=True)
class TokenScores:
    """Log-probability of each target and entropy of each distribution, in nats.

    Args:
        logp, entropy: [N].
        value: [N] predicted returns of a value head (PPO), or None.
        divergence: [N] nats from a teacher's next-token distribution, or None.
        centering: [N] of ``CenteredScores``, or None.
        kl_sampler: [N] nats, KL(sampler || policy) over the whole vocabulary, without gradient; or None.
        tails: [N, 2] the model's and the teacher's probability of all tokens that a server does not name, without
            gradient; NaN for tokens of other teachers; or None.
        sum_squares: [N] sum of the squared probabilities of all tokens, or None.
        observed: [M] log-probability of each token of ``PackedBatch.observed``, or None.

    Example:
        >>> TokenScores(logp=torch.tensor([-0.5]), entropy=torch.tensor([0.7])).logp.shape
        torch.Size([1])
    """

    logp: Float[Tensor, "N"]
    entropy: Float[Tensor, "N"]
    value: Float[Tensor, "N"] | None = None
    divergence: Float[Tensor, "N"] | None = None
    centering: Float[Tensor, "N"] | None = None
    kl_sampler: Float[Tensor, "N"] | None = None
    tails: Float[Tensor, "N 2"] | None = None
    sum_squares: Float[Tensor, "N"] | None = None
    observed: Float[Tensor, "M"] | None = None


@dataclass(frozen=True)
class TokenDivergence:
    """Divergence between the student's and the teacher's distribution of each token, and both streams' scores; nats.

    Args:
        divergence: [N].
        logp, entropy: [N] of the student; ``logp`` is None where no targets were given.
        logp_teacher, entropy_teacher: [N] of the teacher, without gradient.

    Example:
        >>> TokenDivergence(torch.tensor([0.1]), None, torch.tensor([0.7]), None, torch.tensor([0.6])).logp is None
        True
    """

    divergence: Float[Tensor, "N"]
    logp: Float[Tensor, "N"] | None
    entropy: Float[Tensor, "N"]
    logp_teacher: Float[Tensor, "N"] | None
    entropy_teacher: Float[Tensor, "N"]


@dataclass(frozen=True)
class TruncatedDivergence:
    """Divergence of each token over a few tokens and the tail, which is all others together.

    Args:
        divergence: [N] nats; a lower bound of the exact one.
        tail: [N] the student's probability of the tail, without gradient.
        tail_teacher: [N] the teacher's.

    Example:
        >>> TruncatedDivergence(torch.tensor([0.1]), torch.tensor([0.02]), torch.tensor([0.01])).tail
        tensor([0.0200])
    """

    divergence: Float[Tensor, "N"]
    tail: Float[Tensor, "N"]
    tail_teacher: Float[Tensor, "N"]


@dataclass(frozen=True)
class CenteredScores:
    """The term that centres the policy's score under the sampler, and both streams' scores; nats.

    Args:
        centering: [N].
        logp, entropy: [N] of the policy; ``logp`` is None where no targets were given.
        logp_sampler, entropy_sampler: [N] of the sampler, without gradient.

    Example:
        >>> CenteredScores(torch.tensor([0.0]), None, torch.tensor([0.7]), None, torch.tensor([0.7])).centering
        tensor([0.])
    """

    centering: Float[Tensor, "N"]
    logp: Float[Tensor, "N"] | None
    entropy: Float[Tensor, "N"]
    logp_sampler: Float[Tensor, "N"] | None
    entropy_sampler: Float[Tensor, "N"]


@dataclass(frozen=True)
class LMHead:
    """The weights of a causal language model's last layer.

    ``logits = scale * (hidden @ weight.T + bias + lora_scale * (hidden @ lora_a.T) @ lora_b.T)``, then with a softcap c
    ``logits = c * tanh(logits / c)``. Temperature is an argument of the call.

    Args:
        weight: [V, D], trained (``requires_grad``) or frozen.
        bias: [V] or None.
        scale: multiplies the logits (Cohere's ``logit_scale``; one over Granite's ``logits_scaling``).
        softcap: Gemma's ``final_logit_softcapping``, or None.
        lora_a, lora_b: [R, D] and [V, R], both or neither.
        lora_scale: LoRA's alpha / R.

    Raises:
        InputError: shapes that do not fit, one LoRA factor alone, or a softcap that is not positive.

    Example:
        >>> LMHead(weight=torch.zeros(11, 4)).weight.shape
        torch.Size([11, 4])
    """

    weight: Float[Tensor, "V D"]
    bias: Float[Tensor, "V"] | None = None
    scale: float = 1.0
    softcap: float | None = None
    lora_a: Float[Tensor, "R D"] | None = None
    lora_b: Float[Tensor, "V R"] | None = None
    lora_scale: float = 1.0

    def __post_init__(self) -> None:
        if (self.lora_a is None) != (self.lora_b is None):
            raise InputError(
                needed="both LoRA factors or neither",
                given="lora_a only" if self.lora_b is None else "lora_b only",
                remedy="Give lora_a [R, D] and lora_b [V, R] together.",
            )
        if self.softcap is not None and not self.softcap > 0:
            raise InputError(
                needed="a positive softcap", given=str(self.softcap), remedy="Leave softcap at None to switch it off."
            )

    def detached(self) -> "LMHead":
        """The same numbers without a gradient, also after the tensors were given others as ``data``."""
        tensors: dict[str, Any] = {name: value.detach() for name, value in _tensors(self).items()}
        return replace(self, **tensors)


def _check_lengths(item: "TokenBatch | PackedBatch", expected: int, of: str) -> None:
    wrong = {name: list(value.shape) for name, value in _tensors(item).items() if value.shape != (expected,)}
    if wrong:
        raise InputError(
            needed=f"vectors of the length of `{of}` ({expected})",
            given=", ".join(f"{name} {shape}" for name, shape in wrong.items()),
            remedy="Give one value per scored token in every per-token field.",
        )


def _tensors(item: "TokenBatch | PackedBatch | PackedInputs | SharedInputs | LMHead") -> dict[str, Tensor]:
    """The tensor fields by name."""
    values = {f.name: getattr(item, f.name) for f in fields(item)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _moved(
    item: "TokenBatch | PackedBatch | PackedInputs | SharedInputs", device: torch.device | str
) -> dict[str, Any]:
    """The tensor fields by name, copied to a device."""
    return {name: sent(value, device) for name, value in _tensors(item).items()}


def _ranges(counts: Sequence[int], chosen: Sequence[int]) -> Int[Tensor, "K"]:
    """Indices of the chosen ranges, one range after the other, where ranges of ``counts`` items are end to end."""
    all_sizes, indices = torch.tensor(counts, dtype=torch.long), torch.tensor(chosen, dtype=torch.long)
    sizes = all_sizes[indices]
    starts = (all_sizes.cumsum(0) - all_sizes)[indices]
    new_starts = sizes.cumsum(0) - sizes
    return torch.repeat_interleave(starts - new_starts, sizes) + torch.arange(int(sizes.sum()))
