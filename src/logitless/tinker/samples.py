"""A request for samples, checked against the model."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from logitless.errors import RefusedError
from logitless.rollout.sampling import SamplingOptions
from logitless.tinker import wire


@dataclass(frozen=True)
class Request:
    """One prompt to complete.

    Args:
        id: together with ``seed`` it determines the random numbers.
        tokens: the prompt's.
        num_samples, options, seed: see ``Engine.sample``.
        scores_prompt: whether the prompt's log-probs are wanted.
        scores_last: only for so many last tokens of the prompt; None for all.
        top_prompt, top_sampled: how many likeliest tokens are wanted at each position of the prompt, and of samples.
        targets: token ids to score at the prompt's positions.
        only_scores: whether the prompt takes all of the model's positions, so that its samples have no token.
    """

    id: str
    tokens: tuple[int, ...]
    num_samples: int
    options: SamplingOptions
    seed: int
    scores_prompt: bool = False
    scores_last: int | None = None
    top_prompt: int = 0
    top_sampled: int = 0
    targets: wire.Targets | None = None
    only_scores: bool = False

    @property
    def shared(self) -> tuple[Any, ...]:
        """Equal for requests that may share a call of the engine."""
        return self.num_samples, self.options, self.seed, self.only_scores

    @property
    def reads_prompt(self) -> bool:
        """Whether scores of the prompt are wanted."""
        return self.scores_prompt or self.top_prompt > 0 or self.targets is not None


def request_of(request: wire.Sample, *, place: str, seed: int, vocabulary: int, limit: int | None) -> Request:
    """A client's request, checked against the model.

    Args:
        request: the client's.
        place: seeds a request that has no seed; a request with a seed has the same samples everywhere.
        seed: the service's, for requests without one.
        vocabulary: number of tokens of the model.
        limit: number of positions of the model, or None.

    Raises:
        RefusedError: the model cannot serve it, or its fields do not fit together.
        ConfigurationError: see ``SamplingOptions``.
    """
    params, tokens = request.sampling_params, tuple(request.prompt.tokens)
    room = params.max_tokens if limit is None else limit - len(tokens)
    if not tokens:
        raise RefusedError(400, "0 prompt tokens: at least one is needed")
    if room is None:
        raise RefusedError(400, "max_tokens is needed: the model has no limit of positions")
    # As the SDK's compute_logprobs asks: it must ask for a token, and does not read it.
    scores = bool(request.prompt_logprobs or request.topk_prompt_logprobs or request.target_prompt_logprobs)
    only_scores = room == 0 and scores and params.max_tokens in (None, 1)
    if room < (params.max_tokens or 1) and not only_scores:
        remedy = "lower max_tokens, or shorten the prompt" if room > 0 else "shorten the prompt"
        given = f"{len(tokens)} prompt tokens" + (f" and max_tokens {params.max_tokens}" if params.max_tokens else "")
        raise RefusedError(400, f"{given}: the model has {limit} positions; {remedy}")
    last = request.prompt_logprobs_last_n
    if last is not None and not (request.prompt_logprobs and last < len(tokens)):
        raise RefusedError(400, "prompt_logprobs_last_n: prompt_logprobs, and less than the prompt's tokens are needed")
    stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
    top = max(request.topk_prompt_logprobs, request.topk_sample_logprobs)
    if top > vocabulary:
        raise RefusedError(400, f"the {top} likeliest tokens: the model has {vocabulary}")
    greedy = params.temperature == 0
    options = SamplingOptions(
        max_new_tokens=params.max_tokens or max(room, 1),
        temperature=params.temperature,
        top_p=1.0 if greedy else params.top_p,
        top_k=None if greedy or params.top_k in (-1, 0) else params.top_k,
        stop=tuple(each for each in stops if isinstance(each, str)),
        stop_token_ids=tuple(each for each in stops if isinstance(each, int)),
        ignore_eos=params.stop == [],
    )
    targets = wire.targets_of(request.target_prompt_logprobs, len(tokens) - 1)
    scored = () if targets is None else targets.ids[targets.ids >= 0]
    for what, ids in (("prompt", tokens), ("stop", options.stop_token_ids), ("target_prompt_logprobs", scored)):
        try:
            wire.check_tokens(np.array(ids, np.int64), vocabulary)
        except ValueError as error:
            raise RefusedError(400, f"{what}: {error}") from error
    return Request(
        place if params.seed is None else repr(tokens),
        tokens,
        request.num_samples,
        options,
        seed if params.seed is None else params.seed,
        bool(request.prompt_logprobs),
        last,
        request.topk_prompt_logprobs,
        request.topk_sample_logprobs,
        targets,
        only_scores,
    )
