"""An engine behind an OpenAI endpoint on loopback: clients see text, the trainer sees tokens.

    program ──HTTP──> /v1/chat/completions                each request is a conversation by itself
            ──HTTP──> /session/<id>/v1/chat/completions   one growing conversation, whose tokens are kept
                          │ concurrent requests are sampled in one batch
                          v
                        Engine

In a session each turn continues the tokens of the turn before: sampled text is never tokenized again, and ``episode``
returns all tokens with their log-probs and weights version. A completion depends on the seed, the session and the turn
alone, not on the other requests of its batch. Not supported: streaming token by token, and addresses other than
loopback.
"""

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from queue import Empty, Queue
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from transformers import PreTrainedTokenizerBase

from logitless.errors import ConfigurationError, InputError, RefusedError
from logitless.http_server import Endpoint, HttpServer, application, listening
from logitless.rollout.chat import ChatTurns, check_chat_template_kwargs
from logitless.rollout.engine import Engine, Weights
from logitless.rollout.environment import Limits, Reply, checked, joined, tokens_so_far
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.serving import protocol
from logitless.rollout.tool_calls import Format, tool_calls
from logitless.types import Completion, Episode, Prompt

MAX_BODY_BYTES = 8 << 20

MAX_REQUESTS = 1024
"""Requests that are answered at a time; further ones wait."""

R = TypeVar("R", bound=protocol.Request)


@dataclass
class Session:
    """A conversation under way, as tokens.

    Args:
        id: in the url; it seeds the completions.
        most_tokens: limit on the whole sequence, prompt included.
        prompt: the messages and tokens of the first request; None before it.
        messages: all messages so far.
        turns: the policy's completions, each with the reply to it.
        failure: why it cannot be trained on.
        cut: whether a limit ended it.
        closed: whether further requests are refused.
    """

    id: str
    most_tokens: int | None = None
    prompt: Prompt | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: list[tuple[Completion, Reply]] = field(default_factory=list)
    failure: str = ""
    cut: bool = False
    closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def episode(self, reward: float | None = None) -> Episode:
        """The conversation so far.

        Args:
            reward: credited to the last turn; None for no reward.
        """
        if self.prompt is None or not self.turns:
            empty = Completion(self.id, np.zeros(0, np.int64), "", "stop")
            return Episode(empty, (), failure=self.failure or "the policy was never asked")
        completion = joined(self.turns)
        if self.cut:
            completion = replace(completion, finish_reason="length")
        turn_rewards = (*[0.0] * (len(self.turns) - 1), reward) if reward else ()
        return Episode(completion, tuple(self.messages), turn_rewards, self.failure)


@dataclass(frozen=True)
class _Pending:
    """A sampling request that waits for its completions."""

    prompt: Prompt
    num_samples: int
    options: SamplingOptions
    completions: "Future[list[Completion]]"


class EngineServer:
    """Serves an engine until it is closed.

    Args:
        engine: samples; only the server's own thread calls it.
        tokenizer: of the policy.
        options: sampling options of requests that name none.
        seed: of all completions.
        connection: of ``listening``; by default on a free port.
        limits: of a session.
        format: how the policy writes tool calls, for requests with tools.
        template: plain text around ``{reply}``, used instead of the chat template between turns.
        chat_template_kwargs: further variables of the chat template; requests outside a session may override them.
        own_settings: whether requests may override ``options``. False refuses any other value, so that all completions
            of a group are sampled alike.
        gather_seconds: how long the first request of a batch waits for others.
        version: of the engine's weights.
        name: of the model, in replies.

    Attributes:
        url: base url for OpenAI clients whose requests belong to no session.

    Example:
        >>> import json, urllib.request
        >>> from logitless.models.char_tokenizer import character_tokenizer
        >>> class Parrot:
        ...     def sample(self, prompts, num_samples, options, *, seed):
        ...         return [[Completion(p.id, p.token_ids, "ab", "stop")] * num_samples for p in prompts]
        ...     def load(self, weights, version): ...
        ...     def close(self): ...
        >>> with EngineServer(Parrot(), character_tokenizer("ab"), SamplingOptions(9), seed=0) as server:
        ...     asked = urllib.request.Request(f"{server.url}/completions", json.dumps({"prompt": "ab"}).encode())
        ...     json.load(urllib.request.urlopen(asked))["choices"][0]["token_ids"]
        [3, 4]
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        options: SamplingOptions,
        *,
        seed: int,
        connection: socket.socket | None = None,
        limits: Limits = Limits(),
        format: Format = "tool_call",
        template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        own_settings: bool = True,
        gather_seconds: float = 0.005,
        version: int = 0,
        name: str = "policy",
    ) -> None:
        self.tokenizer, self.options, self.seed, self.limits = tokenizer, options, seed, limits
        self.format, self.own_settings, self.version, self.name = format, own_settings, version, name
        connection = connection or listening(0)
        self._engine, self._gather = engine, gather_seconds
        self._engine_lock, self._lock = threading.Lock(), threading.Lock()
        self._closed, self._number = False, 0
        self._sessions: dict[str, Session] = {}
        self._turns: ChatTurns | None = None
        if template is not None or tokenizer.chat_template:
            self._turns = ChatTurns(tokenizer, template=template, chat_template_kwargs=chat_template_kwargs)
        self.chat_template_kwargs = chat_template_kwargs
        self._waiting: Queue[_Pending | None] = Queue()
        self._sampling = threading.Thread(target=self._sample, daemon=True)
        self._sampling.start()
        self._threads = ThreadPoolExecutor(MAX_REQUESTS)
        served = application(self._routes(), error=protocol.error, max_bytes=MAX_BODY_BYTES)
        self._http = HttpServer(served, connection)
        self.root = self._http.url
        self.url = f"{self.root}/v1"

    def __enter__(self) -> "EngineServer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def open_session(self, session_id: str, *, most_tokens: int | None = None) -> str:
        """Begin a conversation; returns the base url for its OpenAI client.

        Args:
            session_id: letters, digits and ``-_.~``; not in use.
            most_tokens: limit on the whole sequence, prompt included.

        Raises:
            InputError: the id is in use.
        """
        with self._lock:
            if session_id in self._sessions:
                raise InputError(needed="a new session", given=repr(session_id), remedy="Close the other one first.")
            self._sessions[session_id] = Session(session_id, most_tokens)
        return f"{self.root}/session/{session_id}/v1"

    def close_session(self, session_id: str) -> Session:
        """End a conversation: wait for a request that is under way, and refuse further ones."""
        with self._lock:
            session = self._sessions.pop(session_id)
        with session.lock:
            session.closed = True
        return session

    def load(self, weights: Weights, version: int) -> None:
        """Sample with these weights, starting with the next batch."""
        with self._engine_lock:
            self._engine.load(weights, version)
            self.version = version

    def close(self) -> None:
        """Answer requests under way, refuse further ones, and stop listening; the caller closes the engine."""
        with self._lock:
            self._closed = True
            self._waiting.put(None)
        self._sampling.join()
        self._http.close()
        self._threads.shutdown()

    # --- requests

    def _routes(self) -> dict[str, Endpoint]:
        async def health(*_: Any) -> Any:
            return {"weights_version": self.version}

        async def models(*_: Any) -> Any:
            model = {"id": self.name, "object": "model", "weights_version": self.version}
            return {"object": "list", "data": [model]}

        def in_thread(kind: type[R], answer: Callable[[R, str | None], dict[str, Any]]) -> Endpoint:
            # it waits for the engine, and a long text is tokenized meanwhile
            async def run(http: Request, body: bytes) -> Any:
                request, session_id = kind.of(body), http.path_params.get("session")
                said = await asyncio.get_running_loop().run_in_executor(self._threads, answer, request, session_id)
                if not request.stream:
                    return said
                options = request.stream_options or protocol.StreamOptions()
                events = protocol.events(said, include_usage=options.include_usage)
                return Response(events, headers={"Content-Type": "text/event-stream"})

            return run

        chat = in_thread(protocol.ChatRequest, self._chat)
        return {
            "GET /health": health,
            "GET /v1/models": models,
            "GET /session/{session}/v1/models": models,
            "POST /v1/completions": in_thread(protocol.CompletionRequest, self._complete),
            "POST /v1/chat/completions": chat,
            "POST /session/{session}/v1/chat/completions": chat,
        }

    def _complete(self, request: protocol.CompletionRequest, _: str | None) -> dict[str, Any]:
        """Complete one or several texts or token lists."""
        given = request.prompt
        several = isinstance(given, list) and not all(isinstance(token, int) for token in given)
        prompts = [self._token_ids(each) for each in (given if several else [given])]
        ids = [f"{self._key(request)}/{i}" for i in range(len(prompts))]
        pending = [self._submit(Prompt(i, "", p), request) for i, p in zip(ids, prompts, strict=True)]
        completions = [completion for future in pending for completion in future.result()]
        choices = [protocol.text_choice(index, completion) for index, completion in enumerate(completions)]
        read = prompts if several else prompts[0]
        return protocol.reply("text_completion", choices, read, model=self.name, version=self.version)

    def _chat(self, request: protocol.ChatRequest, session_id: str | None) -> dict[str, Any]:
        """Answer a conversation: the next turn of a session, or a request by itself."""
        variables = self._template_variables(request, may_differ=self.own_settings and session_id is None)
        if session_id is None:
            ids = self._rendered(request.messages, variables)
            prompt = Prompt(self._key(request), "", ids, messages=tuple(request.messages))
            return self._chat_reply(request, ids, self._submit(prompt, request).result())
        missing = RefusedError(404, f"no session {session_id!r}", "not_found")
        with self._lock:
            session = self._sessions.get(session_id)
        if session is None:
            raise missing
        if not session.lock.acquire(blocking=False):
            session.failure = "two requests at a time in one session"
            raise RefusedError(409, session.failure, "conflict")
        try:
            if session.closed:  # between the lookup and the lock
                raise missing
            return self._next_turn(session, request, variables)
        finally:
            session.lock.release()

    def _next_turn(self, session: Session, request: protocol.ChatRequest, variables: dict[str, Any]) -> dict[str, Any]:
        """Sample the next turn. A session changes only if that succeeds, so that a failed request can be repeated."""
        if request.n not in (None, 1):
            raise RefusedError(400, "n: a session has one completion a turn")
        messages, prompt, turns = request.messages, session.prompt, [*session.turns]
        if prompt is None:
            prompt = Prompt(session.id, "", self._rendered(messages, variables), messages=tuple(messages))
        else:
            before, new = messages[: len(session.messages)], messages[len(session.messages) :]
            if not new or not all(map(_same, before, session.messages)):
                session.failure = session.failure or "the conversation was changed, and not gone on with"
                raise RefusedError(409, f"{session.failure}: it must begin with what was said", "conflict")
            completion, _ = turns[-1]
            assert self._turns is not None
            said = [{**message, "content": message["content"] or ""} for message in new]
            turns[-1] = (completion, Reply(messages=said, token_ids=self._turns.between(completion, said)))
        ids = tokens_so_far(prompt, turns)
        most_new = self._options(request).max_new_tokens
        full = session.most_tokens is not None and len(ids) + most_new > session.most_tokens
        if full or len(turns) >= self.limits.max_turns:
            session.cut = True
            raise RefusedError(400, "the limit of tokens or turns is reached", "context_length_exceeded")
        [completion] = self._submit(Prompt(f"{session.id}/{len(turns)}", "", ids), request).result()
        session.cut, session.prompt = False, prompt
        session.turns = [*turns, (replace(completion, prompt_id=session.id), Reply())]
        session.messages = [*messages, {"role": "assistant", "content": completion.text}]
        return self._chat_reply(request, ids, [completion])

    def _chat_reply(
        self, request: protocol.ChatRequest, prompt_ids: np.ndarray, completions: list[Completion]
    ) -> dict[str, Any]:
        tools = () if request.tool_choice == "none" else request.tools or ()
        names, choices = [tool["function"]["name"] for tool in tools], []
        most_calls = 1 if request.parallel_tool_calls is False else None
        for index, completion in enumerate(completions):
            calls = tool_calls(completion.text, names, self.format) if names else []
            readable = [call for call in calls if not call.error][:most_calls]
            choices.append(protocol.chat_choice(index, completion, readable, self._texts(completion)))
        return protocol.reply("chat.completion", choices, prompt_ids, model=self.name, version=self.version)

    def _texts(self, completion: Completion) -> list[str]:
        """The text of each token; a replacement character where it ends within a character."""
        before = self._anchor  # a SentencePiece decoder drops the space at the start of a text
        ids = [[*before, token] for token in completion.token_ids.tolist()]
        [known, *texts] = self.tokenizer.batch_decode([before, *ids], clean_up_tokenization_spaces=False)
        return [text[len(known) :] for text in texts]

    @cached_property
    def _anchor(self) -> list[int]:
        """A token to decode others behind; none if the tokenizer has none of these."""
        for piece in ("a", "\u2581a", "0", "\u2581"):
            number = self.tokenizer.convert_tokens_to_ids(piece)
            if number is not None and self.tokenizer.convert_ids_to_tokens(number) == piece:
                return [int(number)]
        return []

    def _template_variables(self, request: protocol.ChatRequest, *, may_differ: bool) -> dict[str, Any]:
        """Variables of the chat template besides the messages; the same in all turns of a session."""
        own = request.chat_template_kwargs or {}
        check_chat_template_kwargs(self.tokenizer, own)
        variables = {**self.chat_template_kwargs, **own}
        if variables != self.chat_template_kwargs and not may_differ:
            raise RefusedError(400, "chat_template_kwargs: settled by the recipe; leave it out")
        return variables | ({"tools": request.tools} if request.tools else {})

    def _rendered(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> np.ndarray:
        """The token ids of messages under the chat template."""
        from jinja2 import TemplateError

        if not self.tokenizer.chat_template:
            raise RefusedError(400, "this tokenizer has no chat template; use /v1/completions")
        try:
            text = self.tokenizer.apply_chat_template(
                [*messages], tokenize=False, add_generation_prompt=True, **variables
            )
        except TemplateError as error:
            raise RefusedError(400, f"the chat template refuses the messages: {error}") from error
        return self._token_ids(text)

    def _token_ids(self, prompt: Any) -> np.ndarray:
        """The token ids of a text, or token ids as they are, checked."""
        try:
            ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"] if isinstance(prompt, str) else prompt
        except Exception as error:  # the tokenizers library raises no class of its own
            raise RefusedError(400, f"prompt: {error}") from error
        largest = len(self.tokenizer) - 1
        if not ids or (ids is prompt and not all(0 <= token <= largest for token in ids)):
            raise RefusedError(400, f"prompt: one token at least is needed, and token ids from 0 to {largest}")
        return np.array(ids, np.int64)

    def _options(self, request: protocol.Request) -> SamplingOptions:
        return request.options(self.options, num_tokens=len(self.tokenizer), may_differ=self.own_settings)

    def _key(self, request: protocol.Request) -> str:
        """The prompt id that seeds a request outside a session: its seed, or a running number."""
        if request.seed is not None:
            return f"seed-{request.seed}"
        with self._lock:
            self._number += 1
            return f"request-{self._number}"

    # --- sampling, in a thread of its own

    def _submit(self, prompt: Prompt, request: protocol.Request) -> "Future[list[Completion]]":
        pending = _Pending(prompt, request.n or 1, self._options(request), Future())
        with self._lock:  # a request queued behind the None of `close` would wait for ever
            if self._closed:
                raise RefusedError(503, "the server is closed", "server_error")
            self._waiting.put(pending)
        return pending.completions

    def _sample(self) -> None:
        """Sample until ``close`` queues None: gather requests, and batch those with equal options."""
        while (first := self._waiting.get()) is not None:
            gathered = [first]
            with suppress(Empty):
                while (another := self._waiting.get(timeout=self._gather)) is not None:
                    gathered.append(another)
                self._waiting.put(None)  # `close` was called meanwhile: end after these
            batches: dict[Any, list[_Pending]] = {}
            times: Counter[Any] = Counter()  # equal prompt ids go to different batches: a call takes each id once
            for pending in gathered:
                settings = (pending.options, pending.num_samples)
                times[*settings, pending.prompt.id] += 1
                batches.setdefault((*settings, times[*settings, pending.prompt.id]), []).append(pending)
            for batch in batches.values():
                self._sample_batch(batch)

    def _sample_batch(self, batch: Sequence[_Pending]) -> None:
        prompts, num_samples = [pending.prompt for pending in batch], batch[0].num_samples
        try:
            with self._engine_lock:
                sampled = self._engine.sample(prompts, num_samples, batch[0].options, seed=self.seed)
            groups = checked(sampled, prompts, num_samples)
        except Exception as error:
            if len(batch) > 1 and isinstance(error, InputError | ConfigurationError):
                # One request is at fault, such as a prompt that is too long: bisect, so that the others are answered.
                self._sample_batch(batch[: len(batch) // 2])
                self._sample_batch(batch[len(batch) // 2 :])
                return
            for pending in batch:
                pending.completions.set_exception(error)
            return
        for pending, group in zip(batch, groups, strict=True):
            pending.completions.set_result(group)


def _same(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    """Whether a client's copy of a message equals ours; outer space and parsed tool calls may differ."""
    same_text = (theirs.get("content") or "").strip() == (ours.get("content") or "").strip()
    return theirs.get("role") == ours.get("role") and (same_text or bool(theirs.get("tool_calls")))
