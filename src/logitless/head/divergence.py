"""Divergences between two models' next-token distributions, from their hidden states, over the whole vocabulary."""

from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from logitless.distributed.collectives import num_rows_of_all
from logitless.distributed.sharding import is_sharded
from logitless.errors import InputError
from logitless.head import divergence_chunked, divergence_reference, fused
from logitless.head.contract import (
    Backend,
    checked,
    chosen_backend,
    logits_dtype,
    refuse_budget,
    require,
    without_autocast,
)
from logitless.head.measure import Kind, Measure, Measured, Stream
from logitless.head.sharded import gathered
from logitless.head.vocab_parallel import within_shard
from logitless.types import CenteredScores, Divergence, LMHead, TokenDivergence


def token_divergence(
    hidden: Float[Tensor, "N D"],
    head: LMHead | Float[Tensor, "V D"],
    teacher_hidden: Float[Tensor, "N E"],
    teacher_head: LMHead | Float[Tensor, "W E"],
    target: Int[Tensor, "N"] | None = None,
    *,
    kind: Divergence,
    beta: float | None = None,
    temperature: float | Float[Tensor, "N"] = 1.0,
    teacher_temperature: float | Float[Tensor, "N"] | None = None,
    backend: Literal["auto", "reference", "chunked", "fused"] = "auto",
    memory_budget: int | None = None,
    group: ProcessGroup | None = None,
) -> TokenDivergence:
    """The divergence of each token's next-token distribution from a teacher's, exact over the whole vocabulary.

    With p the student's and q the teacher's distribution, m = (1 - beta) p + beta q, and KL(a || b) = sum a log(a / b):

        forward_kl        KL(q || p)
        reverse_kl        KL(p || q)
        jensen_shannon    beta KL(q || m) + (1 - beta) KL(p || m)
        total_variation   sum |p - q| / 2

    ``jensen_shannon`` is TRL's ``generalized_jsd_loss`` per token: beta=0 is the forward KL and beta=1 the reverse KL,
    although the formula itself goes to 0 at both ends.

    Gradient: of ``divergence``, ``logp`` and ``entropy``, to the student's hidden, weight, bias and LoRA factors that
    require grad; exactly 0 from rows whose incoming gradients are 0. None to the teacher and the temperatures.

    Padded vocabularies: if the heads have V and W tokens, both distributions are over the first min(V, W), as if the
    others had logits of -inf. The others must be padding that the tokenizer never produces; their gradients are 0. Two
    different tokenizers are not noticed: compare them before.

    Sharded heads (FSDP2): both are gathered (``sharded.gathered``). All ranks call it and run backward together, each
    with its own tokens or none. With ``group`` nothing is gathered but sums: 36 bytes a row, 8 more with
    Jensen-Shannon and total variation.

    Args:
        hidden: [N, D] of the student; its dtype is that of its products, inside autocast too.
        head: the student's LM head, or its weight [V, D].
        teacher_hidden: [N, E], in its own dtype, for the same tokens as ``hidden``.
        teacher_head: the teacher's LM head, or its weight [W, E].
        target: [N] integers in range(min(V, W)), or None for no log-probs.
        kind: the divergence.
        beta: the teacher's share of the mixture, in [0, 1], 0.5 by default; only for ``jensen_shannon``.
        temperature: divides the student's logits; a positive number, or one per row.
        teacher_temperature: the same for the teacher; None for the student's.
        backend: ``reference`` holds all logits; ``chunked`` holds tiles of them; ``fused`` uses Triton kernels and
            keeps the logits that fit into the budget; ``auto`` takes ``fused`` where it can run, else ``chunked``, and
            logs why.
        memory_budget: bytes for values of size rows x V; None takes the backend's default.
        group: the process group over which both heads are sharded by vocabulary, as for ``token_scores``; every rank
            holds the same tokens of both, but for padding on the last.

    Returns:
        float32 vectors of length N (float64 for float64 hidden states). A KL is inf where its second distribution
        excludes a token (a bias of -inf) that its first does not.

    Raises:
        InputError: arguments that do not fit together; a target out of range (on CUDA: a device-side assertion).
        UnavailableError: a named backend that cannot run here; a second derivative, but of ``reference``.

    Equals: ``divergence_reference.measured``.
    Memory: ``memory_budget``, beside copies of both hidden states in the products' dtype and, in the backward, ``4 N
        D`` bytes and a scaled copy of hidden if the weight is trained. By default 256 MiB on the CPU; on CUDA a 32nd of
        the device's memory for ``chunked`` and a sixth for ``fused``, which needs at least 0.4 GB.
    Products, of 2 N V D or 2 N V E operations: the forward needs one per stream, for Jensen-Shannon and total variation
        two; the backward one per stream and two of the student's. ``fused`` needs no second one for logits it has kept.
    Accumulation: float32 or wider.
    Determinism: bitwise repeatable. With ``fused`` a row's results do not depend on the other rows or on the budget, as
        long as cuBLAS gives a row the same bits at every place; nor with ``chunked`` on the CPU, as observed for widths
        and ranks that are multiples of 16. The divergence of equal streams is exactly 0. A NaN stays in its row, except
        in the weight's gradient.

    Source: Agarwal et al. 2024, arXiv 2306.13649, equation 1 (the generalised Jensen-Shannon divergence).

    Example:
        >>> import torch
        >>> weight, teacher = torch.zeros(2, 1), torch.tensor([[3.0], [1.0]]).log()  # p = 1/2, 1/2; q = 3/4, 1/4
        >>> ones = torch.ones(1, 1)
        >>> token_divergence(ones, weight, ones, teacher, kind="total_variation").divergence
        tensor([0.2500])
        >>> token_divergence(ones, weight, ones, teacher, torch.tensor([0]), kind="forward_kl").logp_teacher.exp()
        tensor([0.7500])
    """
    measure = measure_of(kind, beta)
    student = hidden, head, temperature
    teacher = teacher_hidden, teacher_head, temperature if teacher_temperature is None else teacher_temperature
    return TokenDivergence(*_measured(student, teacher, target, measure, "teacher", backend, memory_budget, group))


def score_centering(
    hidden: Float[Tensor, "N D"],
    head: LMHead | Float[Tensor, "V D"],
    sampler_hidden: Float[Tensor, "N E"],
    sampler_head: LMHead | Float[Tensor, "W E"],
    target: Int[Tensor, "N"] | None = None,
    *,
    temperature: float | Float[Tensor, "N"] = 1.0,
    sampler_temperature: float | Float[Tensor, "N"] | None = None,
    backend: Literal["auto", "reference", "chunked", "fused"] = "auto",
    memory_budget: int | None = None,
    group: ProcessGroup | None = None,
) -> CenteredScores:
    """The term that makes the policy's score function average to 0 under a sampler with other weights.

    With p the policy's and q the sampler's distribution, and sg for stop-gradient:

        centering = sum_v sg(q_v - p_v) log p_v
        loss of a token with advantage A:  -A logp + A centering

    Tokens are sampled from q. Under q the score ``grad log p(y)`` has the mean ``sum_v q_v grad log p_v``, which is 0
    on-policy. The term subtracts it, without an importance ratio. So the part of an advantage that does not depend on
    the token (a biased baseline, an easy prompt) adds exactly 0 on average, whatever the staleness. The part that
    depends on the token is averaged under q: the mean gradient is ``-Cov_q(A, grad log p)``, on-policy
    ``-Cov_p(A, grad log p)``.

    Gradient: to the policy's hidden, weight, bias and LoRA factors; by its logits ``q - p``, as of -KL(q || p). It is
    exactly 0 if both streams have the same hidden states, head and temperature. None to the sampler.

    Args:
        hidden, head, target, temperature, backend, memory_budget, group: as for ``token_divergence``, of the policy.
        sampler_hidden: [N, E] hidden states of the sampler's weights for the same tokens.
        sampler_head: the sampler's LM head, or its weight [W, E].
        sampler_temperature: the temperature that tokens were sampled with; None for ``temperature``. q is the whole
            softmax, which is not the distribution of a sampler with top-k or top-p.

    Returns:
        float32 vectors of length N (float64 for float64 hidden states).

    Raises:
        InputError, UnavailableError: as ``token_divergence``.

    Equals, Memory, Products, Accumulation, Determinism, padded vocabularies: as for ``token_divergence`` with
        ``forward_kl``.

    Source: arXiv 2609.20807.

    Example:
        >>> import torch
        >>> policy, sampler = torch.zeros(2, 1), torch.tensor([[3.0], [1.0]]).log()  # p = 1/2, 1/2; q = 3/4, 1/4
        >>> policy.requires_grad_()
        tensor([[0.],
                [0.]], requires_grad=True)
        >>> scores = score_centering(torch.ones(1, 1), policy, torch.ones(1, 1), sampler)
        >>> scores.centering.sum().backward()
        >>> policy.grad.T  # q - p
        tensor([[ 0.2500, -0.2500]])
    """
    policy = hidden, head, temperature
    sampler = sampler_hidden, sampler_head, temperature if sampler_temperature is None else sampler_temperature
    options = "sampler", backend, memory_budget, group
    return CenteredScores(*_measured(policy, sampler, target, Measure("centering"), *options))


def measure_of(kind: str, beta: float | None) -> Measure:
    """The measure of a divergence, checked.

    Raises:
        InputError: another name; a beta out of range, or for another divergence.
    """
    if kind not in get_args(Divergence):
        raise InputError(
            needed="a divergence 'forward_kl', 'reverse_kl', 'jensen_shannon' or 'total_variation'",
            given=repr(kind),
            remedy="Take 'reverse_kl' on the student's own completions, 'forward_kl' on the teacher's.",
        )
    if kind != "jensen_shannon":
        if beta is not None:
            raise InputError(
                needed="beta with kind='jensen_shannon' alone",
                given=f"kind={kind!r} and beta={beta}",
                remedy="Leave beta out, or set kind='jensen_shannon'.",
            )
        return Measure(kind)  # type: ignore[arg-type]
    beta = 0.5 if beta is None else beta
    if not 0 <= beta <= 1:
        raise InputError(
            needed="beta between 0 and 1", given=str(beta), remedy="0 is the forward KL, 1 the reverse, 0.5 symmetric."
        )
    ends: dict[float, Kind] = {0.0: "forward_kl", 1.0: "reverse_kl"}
    return Measure(ends.get(beta, "jensen_shannon"), beta)


_Given = tuple[Tensor, LMHead | Tensor, float | Tensor]
"""Hidden states, LM head and temperature of a stream, unchecked."""


def _streams(
    own: _Given,
    other: _Given,
    target: Tensor | None,
    name: str,
    memory_budget: int | None,
    group: ProcessGroup | None,
) -> tuple[Stream, Stream, Tensor | None, int]:
    """Checked streams (the second without gradient), int64 targets, and the size of the common vocabulary.

    With a group, targets and size are of this rank's shards.
    """
    hidden, hidden_other = own[0], other[0]
    if hidden.dim() == 2 and hidden_other.shape[:1] != hidden.shape[:1]:
        raise InputError(
            needed=f"one row of {name}_hidden for each row of hidden ({len(hidden)})",
            given=f"a tensor {list(hidden_other.shape)}",
            remedy="Select the same tokens in both streams.",
        )
    if hidden_other.device != hidden.device:
        raise InputError(
            needed=f"{name}_hidden on {hidden.device}, like hidden",
            given=str(hidden_other.device),
            remedy=f"Bring the {name}'s hidden states and head to the device of the student's.",
        )
    if logits_dtype(hidden_other.dtype) != logits_dtype(hidden.dtype):
        raise InputError(
            needed="both streams in float64, or neither",
            given=f"{hidden.dtype} and {hidden_other.dtype}",
            remedy=f"Convert {name}_hidden to the student's dtype.",
        )
    anything = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
    given = anything if target is None else target
    options: dict[str, Any] = {"memory_budget": memory_budget, "group": group}
    own_head, given, own_temperature = checked(hidden, own[1], given, temperature=own[2], **options)
    try:
        other_head, _, other_temperature = checked(hidden_other, other[1], anything, temperature=other[2], group=group)
    except InputError as error:
        raise InputError(needed=f"of the {name}: {error.needed}", given=error.given, remedy=error.remedy) from error
    if any(is_sharded(head.weight) for head in (own_head, other_head)):
        own_head, other_head = gathered(own_head), gathered(other_head.detached())
    sizes = len(own_head.weight), len(other_head.weight)
    return (
        Stream(hidden, own_head, own_temperature),
        Stream(hidden_other.detach(), other_head.detached(), other_temperature),
        *_common(sizes, None if target is None else given, name, hidden.device, group),
    )


def _common(
    sizes: tuple[int, int], target: Tensor | None, name: str, device: torch.device, group: ProcessGroup | None
) -> tuple[Tensor | None, int]:
    """Targets within the tokens that both heads have (with a group: both of this rank's shards), and their number."""
    vocabulary = min(sizes)
    if group is not None:
        own, other = (num_rows_of_all(size, device, group)[:-1] for size in sizes)
        require(
            own == other,
            needed=f"shards with the same tokens of both heads on every rank, but for the {name}'s padding on the last",
            given="shards of other sizes",
            remedy="Cut both heads at the same tokens.",
        )
        return None if target is None else within_shard(target, vocabulary, group), vocabulary
    if target is not None:
        require(
            target < vocabulary,
            needed=f"targets in range({vocabulary}), the tokens that both heads have",
            given="one beyond",
            remedy="Compare the tokenizers: what pads the larger vocabulary is never a target.",
        )
    return target, vocabulary


def _measured(
    own: _Given,
    other: _Given,
    target: Tensor | None,
    measure: Measure,
    name: str,
    backend: str,
    memory_budget: int | None,
    group: ProcessGroup | None,
) -> Measured:
    """Check the streams and run the backend; ``name`` is the other stream's in errors."""
    student, teacher, target, vocabulary = _streams(own, other, target, name, memory_budget, group)

    def why_not(backend: Backend) -> str | None:
        if backend == "reference" and group is not None:
            return "the vocabulary is sharded over a process group"
        return (fused.why_not(student.hidden) or fused.why_not(teacher.hidden)) if backend == "fused" else None

    chosen = chosen_backend(backend, why_not, "head backend of two streams")
    with without_autocast(student.hidden.device):
        if chosen == "reference":
            refuse_budget(memory_budget)
            return divergence_reference.measured(student, teacher, target, vocabulary, measure)
        if chosen == "fused" and memory_budget is None:
            memory_budget = fused.default_budget(student.hidden.device)
        options = (student, teacher, target, vocabulary, measure, memory_budget)
        return divergence_chunked.measured(*options, fused=chosen == "fused", group=group)
