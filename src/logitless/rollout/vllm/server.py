"""Sampling on vLLM servers over HTTP: token ids in, token ids and their log-probs out, with weights that were proved.

A prompt is one request for all its samples, so that a group has one settings object. Prompts take turns on the servers.
Every sample names the weights that sampled each of its tokens. What fails is asked for again until a deadline; a server
that was restarted gets the weights once more, and what it sampled without them is thrown away. Several threads may ask
at once, and with ``in_flight`` ways of weights another may push meanwhile. Gives up: bits. A completion depends, as far
as rounding does, on what else the server had to do.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from logitless.errors import EngineError
from logitless.http_client import Fault, PassingFault, Patience, Refusal, UnusableAnswer
from logitless.rollout.completions import check_prompts, made_completions, stop_ids
from logitless.rollout.engine import Weights
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.vllm.api import Sampled, VllmServer, request_settings
from logitless.rollout.vllm.probe import Probe
from logitless.rollout.vllm.weight_sync import WeightSync, refuse_others
from logitless.seeds import derived_seed
from logitless.types import Completion, Prompt

logger = logging.getLogger("logitless")

T = TypeVar("T")


@dataclass
class _Watched:
    """A server, how often its weights were found lost and pushed again, and a lock for whoever pushes."""

    server: VllmServer
    restarts: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class VllmServerEngine:
    """An ``Engine`` of one or several servers.

    Args:
        servers: all of the same model.
        sync: brings weights to them.
        tokenizer: decodes completions; the server's is not used.
        probe: made after every push.
        patience: with servers that fail.
        requests_at_once: prompts that a server has at a time.
    """

    def __init__(
        self,
        servers: Sequence[VllmServer],
        sync: WeightSync,
        tokenizer: PreTrainedTokenizerBase,
        *,
        probe: Probe,
        patience: Patience,
        requests_at_once: int = 64,
    ) -> None:
        self._watched = [_Watched(server) for server in servers]
        self._sync, self._tokenizer, self._probe, self._patience = sync, tokenizer, probe, patience
        self._at_once = requests_at_once
        self._weights: Weights | None = None
        self._version, self._context = 0, 0
        self._turn, self._turn_lock = 0, threading.Lock()
        self._probed_before: dict[tuple[int, ...], list[float]] = {}
        self.transfer_numbers: dict[str, float | int] = {}

    @property
    def num_servers(self) -> int:
        """How many there are."""
        return len(self._watched)

    def take_share(self, place: int, of: int) -> None:
        """From now on use every ``of``-th server only, from ``place`` on; other clients have the others.

        Raises:
            UnavailableError: weights on a way that one process alone can take.
        """
        self._watched = self._watched[place::of]
        if of > 1:
            self._sync.keep_apart(place)

    @property
    def prompts_at_once(self) -> int:
        """Prompts that threads may ask for at the same time."""
        return self._at_once * len(self._watched)

    # --- weights

    def load(self, weights: Weights, version: int) -> None:
        """Push the weights to every server and probe each.

        Raises:
            EngineError: a server that cannot be reached or cannot load them, one that somebody else gave weights to,
                or a probe whose log-probs differ.
        """
        with ExitStack() as pushing:
            for watched in self._watched:
                pushing.enter_context(watched.lock)
            push = self._sync.push([watched.server for watched in self._watched], weights, version)
            self._weights, self._version, self._probed_before = weights, version, {}
            self._context = min(self._patiently(w.server, "its models", self._context_of) for w in self._watched)
            # the trainer's log-probs are noted here, before the policy is trained further; then others may probe
            difference = max(self._probed(watched) for watched in self._watched)
        self.transfer_numbers = {
            "weights/pushed_bytes": push.num_bytes,
            "weights/push_seconds": push.seconds,
            "weights/probe_difference_max": difference,
        }
        if push.changed_fraction is not None:
            self.transfer_numbers["weights/changed_fraction"] = push.changed_fraction

    def _context_of(self, server: VllmServer) -> int:
        return server.context(self._sync.model())

    def _probed(self, watched: _Watched) -> float:
        def ask(prompt: Sequence[int], num_samples: int, options: SamplingOptions, seed: int) -> list[Sampled]:
            settings = request_settings(options, ())
            return self._patiently(
                watched.server,
                "a probe",
                lambda server: server.sample(self._sync.model(), prompt, num_samples, settings, seed=seed),
            )

        weights = self._loaded
        return self._probe.within(self._context).check(
            ask,
            weights.module,
            where=watched.server.url,
            version=self._version,
            known=self._probed_before,
            score=weights.score,
        )

    @property
    def _loaded(self) -> Weights:
        if self._weights is None:
            raise EngineError(needed="weights to sample with", given="none yet", remedy="Call load before sample.")
        return self._weights

    def _patiently(self, server: VllmServer, what: str, ask: Callable[[VllmServer], T]) -> T:
        return self._patience.until_done(lambda: ask(server), what=what, where=server.url)

    def _make_current(self, watched: _Watched) -> None:
        """Push the weights again to a server that came back without them.

        Raises:
            EngineError: somebody else gave it weights.
            PassingFault: it is not there.
        """
        with watched.lock:
            held = self._sync.held(watched.server)
            refuse_others(held, watched.server)
            if held == "fresh":
                logger.warning("%s was restarted: it gets the weights again", watched.server.url)
                self._sync.again(watched.server)
                watched.restarts += 1
                self._probed(watched)

    def _has_missed_a_push(self, watched: _Watched, restarts: int) -> bool:
        """Whether a request that began at so many restarts may have met a server without its weights."""
        with watched.lock:  # a push that another thread is at is over by then, and counted
            return watched.restarts != restarts or self._sync.held(watched.server) == "fresh"

    # --- samples

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
    ) -> list[list[Completion]]:
        """Exactly ``num_samples`` completions of each prompt, with the version of the weights that sampled each token.

        ``logp_sampler`` is of the distribution sampled from; at temperature 0, where that is one token, it is 0.

        Raises:
            InputError: as of ``check_prompts``, and settings that vLLM reads otherwise.
            EngineError: servers that fail for longer than the recipe waits, that refuse, that keep giving unusable
                answers, or that somebody else gave weights to.
        """
        module = self._loaded.module
        check_prompts(prompts, num_samples, options, self._context)
        ends = stop_ids(self._tokenizer, module, options)
        settings = request_settings(options, ends)
        asked = [(p.token_ids.tolist(), derived_seed(seed, p.id)) for p in prompts]
        groups = self._round(asked, num_samples, settings)
        return [self._completions(prompt, group, options, ends) for prompt, group in zip(prompts, groups, strict=True)]

    def _next_servers(self, count: int) -> list[_Watched]:
        """Those that so many prompts are completed on, in turn."""
        with self._turn_lock:
            first, self._turn = self._turn, self._turn + count
        return [self._watched[n % len(self._watched)] for n in range(first, first + count)]

    def _round(
        self, asked: Sequence[tuple[list[int], int]], num_samples: int, settings: dict[str, object]
    ) -> list[list[Sampled]]:
        """The samples of each prompt; the first error ends all requests."""
        stopped = threading.Event()
        # Not futures: Ctrl-C while one waits for them can leave their locks taken, and the requests then never end.
        ended: SimpleQueue[tuple[int, list[Sampled] | BaseException]] = SimpleQueue()
        found: dict[int, list[Sampled]] = {}

        def ask(number: int, watched: _Watched, ids: list[int], seed: int) -> None:
            try:
                ended.put((number, self._answer(watched, ids, num_samples, settings, seed, stopped)))
            except BaseException as error:
                ended.put((number, error))

        pool = ThreadPoolExecutor(min(max(1, len(asked)), self.prompts_at_once), "logitless-requests")
        try:
            for number, watched in enumerate(self._next_servers(len(asked))):
                pool.submit(ask, number, watched, *asked[number])
            while len(found) < len(asked):
                try:
                    number, answer = ended.get(timeout=1.0)
                except Empty:  # a signal that came just before the wait is heard after it
                    continue
                if isinstance(answer, BaseException):
                    raise answer
                found[number] = answer
            return [found[number] for number in range(len(asked))]
        except BaseException:  # Ctrl-C too: nothing is left running
            stopped.set()
            for watched in self._watched:
                watched.server.client.give_up()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _answer(
        self,
        watched: _Watched,
        ids: list[int],
        num_samples: int,
        settings: dict[str, object],
        seed: int,
        stopped: threading.Event,
    ) -> list[Sampled]:
        """One prompt's samples, asked for until they come."""

        def attempt() -> list[Sampled]:
            model, restarts = self._sync.model(), watched.restarts
            try:
                samples = watched.server.sample(model, ids, num_samples, settings, seed=seed)
                return [
                    replace(each, versions=self._sync.versions(watched.server, model, each.weights)) for each in samples
                ]
            except Refusal as refusal:  # an adapter that a restarted server did not know, or has been given since
                if refusal.status == 404 and self._has_missed_a_push(watched, restarts):
                    raise PassingFault(str(refusal)) from refusal
                raise

        def between(fault: Fault) -> None:
            logger.warning("%s: %s; asking again", watched.server.url, fault)
            if isinstance(fault, UnusableAnswer):
                return
            try:
                self._make_current(watched)
            except Fault:
                return  # not back yet, or it refuses: the next attempt will say so

        return self._patience.until_done(
            attempt,
            what=f"{num_samples} samples of a prompt",
            where=watched.server.url,
            between=between,
            stopped=stopped,
        )

    def _completions(
        self, prompt: Prompt, sampled: Sequence[Sampled], options: SamplingOptions, ends: Sequence[int]
    ) -> list[Completion]:
        greedy = options.temperature == 0
        made = made_completions(
            self._tokenizer,
            [prompt.id] * len(sampled),
            [sample.token_ids for sample in sampled],
            [np.zeros_like(sample.logp) if greedy else sample.logp for sample in sampled],
            options=options,
            ends=ends,
            version=self._version,
        )
        for sample, completion in zip(sampled, made, strict=True):
            if sample.finish_reason != completion.finish_reason:
                raise EngineError(
                    needed="a server whose completions end where the policy's tokenizer says",
                    given=f"finish reason {sample.finish_reason!r} of a completion of prompt {prompt.id!r} that by its"
                    f" tokens ends because of {completion.finish_reason!r}: ...{sample.token_ids[-8:].tolist()}",
                    remedy="Start the server with the policy's tokenizer and --generation-config vllm.",
                )
        return [_with_versions(completion, each.versions or ()) for completion, each in zip(made, sampled, strict=True)]

    def close(self) -> None:
        """Remove the folder of weights, if it is a private one; the servers go on running."""
        self._sync.close()


def _with_versions(completion: Completion, versions: tuple[int, ...]) -> Completion:
    """The completion with the oldest version, and with that of each token where there are several."""
    several = len(set(versions)) > 1
    return replace(completion, weights_version=min(versions), token_versions=np.array(versions) if several else None)
