"""A teacher on a vLLM server, which gives log-probs of sampled tokens and of the likeliest ones."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from logitless.errors import ConfigurationError, EngineError
from logitless.http_client import HttpClient, Patience
from logitless.rollout.vllm.api import VllmServer
from logitless.train.recipe.training import Backend
from logitless.types import PackedBatch, Prompt, TokenScores

T = TypeVar("T")

REQUESTS_AT_ONCE = 64
"""Sequences that a server scores at a time."""


class ServedTeacher:
    """A model on a server. Its log-probs are exact, at temperature 1; of its other tokens there is the sum alone."""

    def __init__(self, server: VllmServer, *, patience: Patience) -> None:
        self._server, self._patience = server, patience
        self._model: str | None = None

    @classmethod
    def at(cls, url: str) -> "ServedTeacher":
        """The teacher at an address."""
        return cls(VllmServer(HttpClient(url)), patience=Patience())

    def check(self, prompt: Prompt) -> None:
        """Once, before anything is scored: that the server has one model, and reads a prompt as the policy does.

        Raises:
            EngineError: it has several models, or cannot be reached.
            ConfigurationError: it has another tokenizer.
        """
        if self._model is not None:
            return
        models = list(self._patiently("a list of models", lambda: self._server.models()))
        if len(models) != 1:
            raise EngineError(
                needed=f"a server of one model at {self._server.url}, the teacher",
                given=", ".join(map(repr, models)) or "none",
                remedy="Start a server for the teacher alone.",
            )
        tokens = self._patiently("tokens of a prompt", lambda: self._server.tokenize(models[0], prompt.text))
        own = prompt.token_ids.tolist()
        if tokens != own[len(own) - len(tokens) :]:  # ahead of them the policy may have a start token
            raise ConfigurationError(
                needed="a teacher with the policy's tokenizer: both models are compared token by token",
                given=f"another one at {self._server.url}, which reads prompt {prompt.id!r} otherwise",
                remedy="Serve a teacher of the policy's model family (teacher.source).",
            )
        self._model = models[0]

    def scores(self, batch: PackedBatch, *, temperature: float, backend: Backend) -> TokenScores:
        """logp [N] of the batch's targets at temperature 1, float32, on the CPU; entropy NaN.

        Raises:
            EngineError: the server cannot be reached, or answers something else.
        """
        del temperature, backend
        logp = torch.full((batch.num_tokens,), torch.nan)
        for at, places, found in self._of_each(batch, "log-probs of a prompt", self._server.prompt_logp):
            logp[at] = torch.from_numpy(found[places])
        return TokenScores(logp, torch.full_like(logp, torch.nan))

    def top(self, batch: PackedBatch, count: int) -> tuple[Int[Tensor, "N K"], Float[Tensor, "N K"]]:
        """The likeliest tokens in the place of each of the batch's targets, and their log-probs; on the CPU.

        Args:
            count: K, at most the server's --max-logprobs.

        Raises:
            EngineError: as ``scores``.
        """
        ids = torch.zeros(batch.num_tokens, count, dtype=torch.long)
        logp = torch.full((batch.num_tokens, count), torch.nan)
        ask = partial(self._server.prompt_top, count=count)
        for at, places, found in self._of_each(batch, "likeliest tokens of a prompt", ask):
            ids[at], logp[at] = (torch.from_numpy(each[places]) for each in found)
        return ids, logp

    def _of_each(
        self, batch: PackedBatch, what: str, ask: Callable[[str, list[int]], T]
    ) -> Iterator[tuple[slice, np.ndarray, T]]:
        """For each sequence with a target: its tokens' places in the batch and in the answer, and the answer."""
        assert self._model is not None, "call check first"
        model, inputs, target = self._model, batch.inputs.to("cpu"), batch.target.cpu()
        work, read, scored = [], 0, 0
        for length, count in zip(inputs.lengths, inputs.source_counts, strict=True):
            if count:
                places = (inputs.source[scored : scored + count] - read).numpy()
                ids = [*inputs.input_ids[read : read + length].tolist(), int(target[scored + count - 1])]
                work.append((slice(scored, scored + count), ids[: places[-1] + 2], places))
            read, scored = read + length, scored + count
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            answers = pool.map(lambda each: self._patiently(what, lambda: ask(model, each[1])), work)
            for (at, _, places), answer in zip(work, answers, strict=True):
                yield at, places, answer

    def _patiently(self, what: str, ask: Callable[[], T]) -> T:
        return self._patience.until_done(ask, what=what, where=self._server.url)
