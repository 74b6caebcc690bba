"""The nouns: what flows between rollout, rewards, packing, head and objective.

Letters: N scored tokens, B sequences (completions), T tokens the backbone reads (prompts included), V vocabulary,
D hidden size, R LoRA rank. Every tensor of length N speaks of ``target[t]``, predicted from hidden row ``source[t]``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from logitless.errors import InputError
from logitless.transfer import sent

VerdictStatus = Literal["graded", "spoiled", "error", "timeout", "missing"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """One question put to the policy.

    Args:
        id: unique within its data set.
        text: what the model reads, chat template already applied.
        token_ids: ``text`` tokenized.
        columns: the data row, handed to reward functions by name (``answer``, ``kwargs``, ...).
        messages: the conversation before the chat template, where there was one.
        source: name of the data that it is of, where a run has several; rewards may judge some of them alone.

    Example:
        >>> Prompt(id="7", text="2+2=", token_ids=(4, 9, 4, 11), columns={"answer": "4"}).columns["answer"]
        '4'
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, str], ...] | None = None
    source: str = ""


@dataclass(frozen=True)
class Completion:
    """One sampled answer.

    Args:
        prompt_id: the ``Prompt.id`` it answers.
        token_ids: what was sampled, the stop token included.
        text: decoded, truncated at the stop sequence, without special tokens: the text that is graded.
        finish_reason: ``stop`` (a stop token or stop string came) or ``length`` (cut at max_new_tokens).
        logp_sampler: nats per token, of the distribution that was actually sampled from (temperature and filters
            included); None where the engine gives none.
        trained: False for tokens that a tool or environment wrote; None when all are the policy's.
        turn: non-decreasing id of the assistant turn of each token; None for single-turn completions.
        weights_version: of the weights that it was drawn with, as ``Engine.load`` was told; None where nobody knows.
        entropy_sampler: nats per token, of the model's softmax at the sampling temperature, before filters and
            penalties; None where the engine gives none.
        token_versions: of the weights that drew each token, where they changed on the way; None where
            ``weights_version`` says it of all. It is the oldest of them then.
        logp_policy: nats per token, of the model's softmax at the sampling temperature, where filters or penalties made
            it another than what was sampled from; None where it is ``logp_sampler``, or the engine gives none.

    Raises:
        InputError: a per-token field has another length than ``token_ids``.

    Example:
        >>> Completion("7", token_ids=(4, 2), text="4", finish_reason="stop", logp_sampler=(-0.1, -0.2)).length
        2
    """

    prompt_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logp_sampler: tuple[float, ...] | None = None
    trained: tuple[bool, ...] | None = None
    turn: tuple[int, ...] | None = None
    weights_version: int | None = None
    entropy_sampler: tuple[float, ...] | None = None
    token_versions: tuple[int, ...] | None = None
    logp_policy: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("logp_sampler", "trained", "turn", "entropy_sampler", "token_versions", "logp_policy"):
            value = getattr(self, name)
            if value is not None and len(value) != len(self.token_ids):
                raise InputError(
                    needed=f"one {name} per token ({len(self.token_ids)})",
                    given=f"{len(value)}",
                    remedy="Give a value for every token id, or None.",
                )

    @property
    def length(self) -> int:
        """Number of tokens, the stop token included."""
        return len(self.token_ids)


@dataclass(frozen=True)
class Episode:
    """What became of one prompt: all that was said, which tokens of it the policy wrote, and what was paid on the way.

    Args:
        completion: every token after the prompt, those of the environment included (``trained=False``); its ``text`` is
            that of the last assistant turn.
        messages: the conversation from the prompt to the end.
        turn_rewards: paid by the environment, one for each assistant turn; empty where it pays nothing.
        failure: why the environment could not go on, where that was its own failure: the episode has no reward then.

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
        return 1 if self.completion.turn is None else 1 + max(self.completion.turn, default=0)


@dataclass(frozen=True)
class Verdict:
    """What a reward function says of one completion.

    A completion that makes its own grading fail has a score, that of a wrong answer: or stalling would pay better than
    being wrong. A failure that is not the completion's has none.

    Args:
        score: the reward; a finite number exactly when ``status`` is ``graded`` or ``spoiled``.
        status: ``graded``; ``spoiled`` (the completion went over a limit of time, memory or size, or ended the process
            that graded it); ``error`` (the grader raised or gave nonsense); ``timeout`` (the grader waited for
            something else, or the machine did not let it run); ``missing`` (it cannot be graded here: data absent, or
            the function returned None).
        detail: (constraint id, satisfied) in the prompt's order; ids may repeat.
        message: why it was not graded.
        traceback: of the grader, where it raised.

    Raises:
        InputError: a score without ``graded`` or ``spoiled``, one of these without a score, or a score that is not
            finite.

    Example:
        >>> Verdict.graded(0.5, detail=(("punctuation:no_comma", True), ("startend:quotation", False))).score
        0.5
        >>> Verdict(score=0.0, status="spoiled", message="timeout: over 2 s").score
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
        if finite != (self.status in ("graded", "spoiled")) or (self.score is not None and not finite):
            raise InputError(
                needed="a finite score exactly when the status is 'graded' or 'spoiled'",
                given=f"score={self.score}, status={self.status!r}",
                remedy="Use Verdict.graded(score), or score=None with another status.",
            )

    @property
    def failed(self) -> bool:
        """Whether the grader failed, by no fault of the completion: ``error`` or ``timeout``."""
        return self.status in ("error", "timeout")

    @classmethod
    def graded(cls, score: float, detail: Sequence[tuple[str, bool]] = ()) -> "Verdict":
        """A verdict with a score."""
        return cls(score=float(score), status="graded", detail=tuple(detail))


@dataclass(frozen=True)
class Group:
    """The G completions of one prompt with what the reward functions said of them.

    Args:
        prompt: the prompt all of them answer.
        completions: G completions.
        verdicts: one mapping (reward name -> Verdict) a completion.
        rewards: the weighted sum a completion, what its turns were paid included; None where every function left it
            unscored.
        turn_rewards: the part of ``rewards`` that the environment paid at the turns of each completion; empty where it
            paid nothing.
        conversations: the messages of each completion, from the prompt to its end; empty where all are single turns.

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

    def __post_init__(self) -> None:
        if not len(self.completions) == len(self.verdicts) == len(self.rewards):
            raise InputError(
                needed="equally many completions, verdict mappings and rewards",
                given=f"{len(self.completions)}, {len(self.verdicts)} and {len(self.rewards)}",
                remedy="Give a verdict and a reward (None if unscorable) for every completion.",
            )
        if self.turn_rewards and len(self.turn_rewards) != len(self.completions):
            raise InputError(
                needed=f"the turn rewards of each of {len(self.completions)} completions, or none",
                given=str(len(self.turn_rewards)),
                remedy="Give an empty tuple for a completion whose turns pay nothing.",
            )
        if self.conversations and len(self.conversations) != len(self.completions):
            raise InputError(
                needed=f"the messages of each of {len(self.completions)} completions, or none",
                given=str(len(self.conversations)),
                remedy="Give the conversation of every completion.",
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
    """What a backbone reads for B sequences laid end to end, without padding.

    Args:
        input_ids: [T] prompts and completions.
        position_ids: [T] counting from 0 in every sequence.
        lengths: B numbers that sum to T, on the host.
        source: [N] index into T of the hidden row that predicts each target; increasing.
        source_counts: B numbers that sum to N: scored tokens of each sequence (0 is allowed), on the host.
        prefixes: B times (id, tokens), the shortest first: the sequences of one id begin with the same so many tokens,
            which a pass may read once; whoever has one has also those that it begins with. None: nobody knows.

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
        """The same on another device, for whatever is launched next there."""
        moved: dict[str, Any] = {name: sent(value, device) for name, value in _tensors(self).items()}
        return replace(self, **moved)

    def take(self, sequences: Sequence[int]) -> "PackedInputs":
        """The inputs of these sequences, in this order.

        A field that is a tuple has one entry a sequence; a tensor other than ``source`` has one row a token to read.
        """
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
    """Tokens of a prompt and of its completions in a packed row; no completions, or no prompt, are plain sequences.

    In place of a completion there may be a group again: what several sequences go on with, and each of them then.

    Example:
        >>> group = PromptGroup(3, (2, PromptGroup(4, (1, 2))))
        >>> group.size, group.longest
        (12, 9)
    """

    prompt: int
    completions: "tuple[int | PromptGroup, ...]" = ()

    @property
    def branches(self) -> "tuple[PromptGroup, ...]":
        """The completions, each as a group."""
        return tuple(PromptGroup(each) if isinstance(each, int) else each for each in self.completions)

    @property
    def size(self) -> int:
        """Tokens, each counted once."""
        return self.prompt + sum(each.size for each in self.branches)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt + max((each.longest for each in self.branches), default=0)

    @property
    def least(self) -> int:
        """The smallest number of tokens in it."""
        return min([self.prompt, *(each.least for each in self.branches)])


@dataclass(frozen=True)
class SharedInputs:
    """The same sequences with what they begin with once: a backbone reads it where all of them attend to it.

    A prompt lies before its completions, and their positions continue from it; likewise what several prompts begin
    with, or several completions of one.

    Args:
        input_ids: [T].
        position_ids: [T] in each token's sequence.
        groups: in the order in which they lie; on the host.
        source: [N] index into T of the hidden row that predicts each target; targets behind one row have it in common.

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
        """Tokens of the longest sequence, its prompt included."""
        return max(group.longest for group in self.groups)

    def to(self, device: torch.device | str) -> "SharedInputs":
        """The same on another device, for whatever is launched next there."""
        moved: dict[str, Any] = {name: sent(value, device) for name, value in _tensors(self).items()}
        return replace(self, **moved)


@dataclass(frozen=True)
class PackedBatch:
    """The sampled tokens of B sequences as packing leaves them, before anybody has scored them.

    Args:
        inputs: what the backbone reads.
        target: [N] vocabulary ids of the sampled tokens.
        turn: [N] non-decreasing turn ids inside a sequence; 0 everywhere where there is one turn.
        logp_sampler: [N] nats, float32, from the engine; NaN where it gave none.
        lag: [N] optimizer steps that the policy has seen and the weights that drew the token had not, 0 where nobody
            knows; or None.

    Raises:
        InputError: a vector of another length than ``inputs.source``.

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

    def __post_init__(self) -> None:
        _check_lengths(self, len(self.inputs.source), "inputs.source")

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
        """The same on another device, for whatever is launched next there."""
        moved: dict[str, Any] = {name: sent(value, device) for name, value in _tensors(self).items()}
        return replace(self, **moved, inputs=self.inputs.to(device))

    def tokens_of(self, sequences: Sequence[int]) -> Int[Tensor, "K"]:
        """Where the tokens of these sequences stand, one sequence after the other; on the CPU."""
        return _ranges(self.inputs.source_counts, sequences)

    def take(self, sequences: Sequence[int]) -> "PackedBatch":
        """The batch of these sequences, in this order, renumbered from 0."""
        tokens = self.tokens_of(sequences).to(self.target.device)
        taken: dict[str, Any] = {name: value[tokens] for name, value in _tensors(self).items()}
        return replace(self, **taken, inputs=self.inputs.take(sequences))


@dataclass(frozen=True)
class TokenBatch:
    """Scored tokens of B sequences, end to end: everything an objective needs besides ``logp`` and ``entropy``.

    The four policies: ``logp`` (trained; not stored here), ``logp_old`` (the trainer's weights when the batch was
    drawn), ``logp_sampler`` (the engine that produced the tokens), ``logp_ref`` (frozen). Nats, float32 or float64.

    Args:
        sequence: [N] non-decreasing ids in ``range(num_sequences)``.
        num_sequences: B, sequences without a scored token included.
        advantage: [N]; a per-sequence advantage is the same value on each of its tokens.
        token_weight: [N] normalisation (see ``objective.weighting``); ``loss = (token_weight * token_loss).sum()``.
        logp_old, logp_sampler, logp_ref: [N] or None.
        entropy_old: [N] entropy of the scoring pass, or None.
        turn: [N] non-decreasing turn ids inside a sequence, or None.
        lag: [N] optimizer steps between the weights that drew the token and those of ``logp_old``, or None.
        value_old: [N] value predictions of the scoring pass (PPO), or None.
        value_target: [N] return the value head is fitted to (PPO), NaN where there is none; or None.
        entropy_weight: [N] normalisation of the entropy bonus, or None.
        value_weight: [N] normalisation of the value loss, or None.
        selected: [N] tokens that a covariance loss picked from the scoring pass, or None.

    Raises:
        InputError: a vector of another length, a decreasing sequence id, or an id outside ``range(num_sequences)``
            (checked for CPU tensors only: on a GPU the check would cost a synchronisation).

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
                    remedy="Lay the tokens of each sequence end to end, in the order of their ids.",
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
        """The same on another device, for whatever is launched next there."""
        moved: dict[str, Any] = {name: sent(value, device) for name, value in _tensors(self).items()}
        return replace(self, **moved)

    def take(self, sequences: Sequence[int]) -> "TokenBatch":
        """The batch of these sequences, in this order, renumbered from 0; ``token_weight`` is kept as it is.

        The counts of tokens are brought to the host: on a GPU that is a synchronisation.
        """
        counts = torch.bincount(self.sequence, minlength=self.num_sequences).tolist()
        device = self.sequence.device
        tokens = _ranges(counts, sequences).to(device)
        taken: dict[str, Any] = {name: value[tokens] for name, value in _tensors(self).items()}
        kept = torch.tensor([counts[s] for s in sequences], dtype=torch.long)
        taken["sequence"] = torch.repeat_interleave(torch.arange(len(sequences)), kept).to(device)
        return replace(self, **taken, num_sequences=len(sequences))


@dataclass(frozen=True)
class TokenScores:
    """What the head gives: log-probability of each target and entropy of each distribution, in nats.

    Args:
        logp, entropy: [N].
        value: [N] prediction of the return from each token on, by a policy with a value head (PPO); or None.

    Example:
        >>> TokenScores(logp=torch.tensor([-0.5]), entropy=torch.tensor([0.7])).logp.shape
        torch.Size([1])
    """

    logp: Float[Tensor, "N"]
    entropy: Float[Tensor, "N"]
    value: Float[Tensor, "N"] | None = None


@dataclass(frozen=True)
class LMHead:
    """The last layer of a causal language model, as data.

    Equals ``logits = scale * (hidden @ weight.T + bias + lora_scale * (hidden @ lora_a.T) @ lora_b.T)``, then, with a
    softcap c, ``logits = c * tanh(logits / c)``. Temperature is not part of it: it belongs to the call.

    Args:
        weight: [V, D], tied to the embedding or not, trained (``requires_grad``) or frozen.
        bias: [V] or None.
        scale: multiplies the logits (Cohere's ``logit_scale``; one over Granite's ``logits_scaling``).
        softcap: Gemma's ``final_logit_softcapping``, or None.
        lora_a, lora_b: [R, D] and [V, R], both or neither.
        lora_scale: LoRA's alpha / R.

    Raises:
        InputError: shapes that do not fit, one LoRA factor without the other, or a softcap that is not positive.

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


def _check_lengths(item: "TokenBatch | PackedBatch", expected: int, of: str) -> None:
    wrong = {name: list(value.shape) for name, value in _tensors(item).items() if value.shape != (expected,)}
    if wrong:
        raise InputError(
            needed=f"vectors of the length of `{of}` ({expected})",
            given=", ".join(f"{name} {shape}" for name, shape in wrong.items()),
            remedy="Give one value per scored token in every per-token field.",
        )


def _tensors(item: "TokenBatch | PackedBatch | PackedInputs | SharedInputs") -> dict[str, Tensor]:
    """The tensor fields by name."""
    values = {f.name: getattr(item, f.name) for f in fields(item)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _ranges(counts: Sequence[int], chosen: Sequence[int]) -> Int[Tensor, "K"]:
    """Indices of the chosen contiguous ranges, one after the other."""
    every, these = torch.tensor(counts, dtype=torch.long), torch.tensor(chosen, dtype=torch.long)
    sizes = every[these]
    begins = (every.cumsum(0) - every)[these] - (sizes.cumsum(0) - sizes)
    return torch.repeat_interleave(begins, sizes) + torch.arange(int(sizes.sum()))
