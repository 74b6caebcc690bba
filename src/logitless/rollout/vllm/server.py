"""Sampling on vLLM servers over HTTP: token ids in, token ids and log-probs out, with verified weights.

All samples of a prompt are one request; prompts go to the servers in turn. Every sample names the weights that sampled
each of its tokens. Failed requests are repeated until a deadline. A server that was restarted gets the weights again,
and what it sampled without them is discarded. Several threads may sample at once, and with ``in_flight`` weight
transfer another may push meanwhile. Log-probs are not bitwise identical to training's: a completion depends, through
rounding, on the server's other requests.
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
    """A server, how often its weights were lost and pushed again, and a lock for pushing."""

    server: VllmServer
    restarts: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class VllmServerEngine:
    """An ``Engine`` of one or several servers.

    Args:
        servers: all of the same model.
        sync: transfers weights to them.
        tokenizer: decodes completions; the server's is not used.
        probe: checks log-probs after every push.
        patience: with servers that fail.
        requests_at_once: prompts that a server samples at a time.
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
        return len(self._watched)

    def take_share(self, place: int, of: int) -> None:
        """Use every ``of``-th server only, starting with number ``place``; other clients use the others."""
        self._watched = self._watched[place::of]
        if of > 1:
            self._sync.keep_apart(place)

    @property
    def prompts_at_once(self) -> int:
        return self._at_once * len(self._watched)

    # --- weights

    def load(self, weights: Weights, version: int) -> None:
        """Push the weights to every server and probe each.

        Raises:
            EngineError: a server that cannot be reached, fails to load them or has another client's weights, or a probe
                whose log-probs differ.
        """
        with ExitStack() as pushing:
            for watched in self._watched:
                pushing.enter_context(watched.lock)
            push = self._sync.push([watched.server for watched in self._watched], weights, version)
            self._weights, self._version, self._probed_before = weights, version, {}
            model = self._sync.model()
            contexts = (
                self._patiently(w.server, "a list of models", lambda s: s.context(model)) for w in self._watched
            )
            self._context = min(contexts)
            # saves the trainer's log-probs before the policy is trained further, for later probes
            difference = max(self._probed(watched) for watched in self._watched)
        self.transfer_numbers = {
            "weights/pushed_bytes": push.num_bytes,
            "weights/push_seconds": push.seconds,
            "weights/probe_difference_max": difference,
        }
        if push.changed_fraction is not None:
            self.transfer_numbers["weights/changed_fraction"] = push.changed_fraction

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
        """Push the weights again to a server that lost them in a restart.

        Raises:
            EngineError: it holds another client's weights.
            PassingFault: it does not respond.
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
        """Whether a request that began after ``restarts`` restarts may have reached a server without the weights."""
        with watched.lock:  # waits for another thread's push, which is counted then
            return watched.restarts != restarts or self._sync.held(watched.server) == "fresh"

    # --- samples

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
    ) -> list[list[Completion]]:
        """Exactly ``num_samples`` completions of each prompt, with the version of the weights that sampled each token.

        ``logp_sampler`` is of the distribution sampled from; at temperature 0, where that is one token, it is 0.

        Raises:
            InputError: see ``check_prompts``; or options that vLLM interprets differently.
            EngineError: servers that fail for longer than the recipe waits, refuse a request, repeatedly give unusable
                replies, or hold another client's weights.
        """
        module = self._loaded.module
        check_prompts(prompts, num_samples, options, self._context)
        ends = stop_ids(self._tokenizer, module, options)
        settings = request_settings(options, ends)
        asked = [(p.token_ids.tolist(), derived_seed(seed, p.id)) for p in prompts]
        groups = self._sample_all(asked, num_samples, settings)
        return [self._completions(prompt, group, options, ends) for prompt, group in zip(prompts, groups, strict=True)]

    def _next_servers(self, count: int) -> list[_Watched]:
        """The servers for so many prompts, in turn."""
        with self._turn_lock:
            first, self._turn = self._turn, self._turn + count
        return [self._watched[n % len(self._watched)] for n in range(first, first + count)]

    def _sample_all(
        self, asked: Sequence[tuple[list[int], int]], num_samples: int, settings: dict[str, object]
    ) -> list[list[Sampled]]:
        """The samples of each prompt, requested in parallel; the first error ends all requests."""
        stopped = threading.Event()
        # Not futures: Ctrl-C while waiting for one can leave its lock taken, and the requests then never end.
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
                except Empty:  # the timeout lets Ctrl-C be handled
                    continue
                if isinstance(answer, BaseException):
                    raise answer
                found[number] = answer
            return [found[number] for number in range(len(asked))]
        except BaseException:  # also Ctrl-C: leave no request running
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
        """One prompt's samples, requested until they come."""

        def attempt() -> list[Sampled]:
            model, restarts = self._sync.model(), watched.restarts
            try:
                samples = watched.server.sample(model, ids, num_samples, settings, seed=seed)
                return [
                    replace(each, versions=self._sync.versions(watched.server, model, each.weights)) for each in samples
                ]
            except Refusal as refusal:  # 404: the server was restarted and did not know the adapter
                if refusal.status == 404 and self._has_missed_a_push(watched, restarts):
                    raise PassingFault(str(refusal)) from refusal
                raise

        def between(fault: Fault) -> None:
            if isinstance(fault, UnusableAnswer):
                return
            try:
                self._make_current(watched)
            except Fault:
                return  # the next attempt raises if it still fails

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
            versions=[np.array(sample.versions) for sample in sampled],
        )
        for sample, completion in zip(sampled, made, strict=True):
            if sample.finish_reason != completion.finish_reason:
                raise EngineError(
                    needed="a server whose completions end where the policy's tokenizer says",
                    given=f"finish reason {sample.finish_reason!r} of a completion of prompt {prompt.id!r} that by its"
                    f" tokens ends because of {completion.finish_reason!r}: ...{sample.token_ids[-8:].tolist()}",
                    remedy="Start the server with the policy's tokenizer and --generation-config vllm.",
                )
        return made

    def close(self) -> None:
        """Close the weight transfer, and remove its private folder; the servers keep running."""
        self._sync.close()
