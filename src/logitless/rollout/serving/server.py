"""An engine behind an OpenAI endpoint on loopback: who asks sees text, who trains sees the tokens.

    program ──HTTP──> /v1/chat/completions            a conversation of its own with every request
            ──HTTP──> /session/<id>/v1/chat/completions   one conversation that grows; its tokens are kept
                          │ requests that come together are sampled together
                          v
                        Engine

In a session every turn goes on from the tokens of the one before it: nothing that the policy said is tokenized again,
and ``episode`` gives all of them with their log-probs and the version of their weights. Requests wait for each other's
batch; a completion depends on the seed, the session and its turn alone. Gives up streams of pieces, and any address but
loopback.
"""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import ThreadingHTTPServer
from queue import Empty, Queue
from types import MappingProxyType
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from logitless.errors import ConfigurationError, InputError
from logitless.rollout.chat import ChatTurns, check_chat_template_kwargs
from logitless.rollout.engine import Engine, Weights
from logitless.rollout.environment import Limits, Reply, checked, joined, tokens_so_far
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.serving import protocol
from logitless.rollout.serving.handler import Handler
from logitless.rollout.tool_calls import Format, tool_calls
from logitless.types import Completion, Episode, Prompt


@dataclass
class Session:
    """A conversation under way, as its tokens.

    Args:
        id: in the url; it seeds the completions.
        most_tokens: prompt and everything after it.
        prompt: what the policy read first; None before the first request.
        turns: the policy's, each with what it was answered.
        failure: why it cannot be trained on.
        cut: whether a limit ended it.
        closed: whether nothing is said in it any more.
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
        """What was said in it; a reward is that of the last turn.

        Args:
            reward: of whoever drove the conversation; None where it has none to give.
        """
        if self.prompt is None or not self.turns:
            nothing = Completion(self.id, np.zeros(0, np.int64), "", "stop")
            return Episode(nothing, (), failure=self.failure or "the policy was never asked")
        told = joined(self.turns)
        if self.cut:
            told = replace(told, finish_reason="length")
        paid = () if reward is None else (*[0.0] * (len(self.turns) - 1), reward)
        return Episode(told, tuple(self.messages), paid if any(paid) else (), self.failure)


@dataclass(frozen=True)
class _Asked:
    """A completion that somebody waits for."""

    prompt: Prompt
    num_samples: int
    options: SamplingOptions
    answer: "Future[list[Completion]]"


class EngineServer:
    """Serves an engine until it is closed.

    Args:
        engine: samples; only the server's own thread asks it.
        tokenizer: of the policy.
        options: of sampling; what requests may change, ``own_settings`` says.
        seed: of all completions.
        port: 0 takes a free one.
        limits: of a session.
        format: how the policy writes tool calls, where a request names tools.
        template: plain text around ``{reply}``, used instead of the chat template between turns.
        chat_template_kwargs: further variables of the chat template; requests that stand alone may bring others.
        own_settings: whether a request may bring a temperature and the like of its own. Where it may not, another one
            than ``options`` has is refused: all completions of a group are drawn alike.
        gather_seconds: how long the first request of a batch waits for others.
        version: of the engine's weights.

    Attributes:
        url: the base url of an OpenAI client whose requests stand alone.

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
        port: int = 0,
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
        self._engine, self._gather = engine, gather_seconds
        self._engine_lock, self._lock = threading.Lock(), threading.Lock()
        self._closed, self._number = False, 0
        self._sessions: dict[str, Session] = {}
        self._turns: ChatTurns | None = None
        if template is not None or tokenizer.chat_template:
            self._turns = ChatTurns(tokenizer, template=template, chat_template_kwargs=chat_template_kwargs)
        self.chat_template_kwargs = chat_template_kwargs
        self._waiting: Queue[_Asked | None] = Queue()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, self))
        self._http.daemon_threads = True
        self.root = f"http://127.0.0.1:{self._http.server_port}"
        self.url = f"{self.root}/v1"
        self._threads = [
            threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True),
            threading.Thread(target=self._sample, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "EngineServer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def open_session(self, session_id: str, *, most_tokens: int | None = None) -> str:
        """Begin a conversation; returns the base url of the OpenAI client that has it.

        Args:
            session_id: letters, digits and ``-_.~``, new.
            most_tokens: that its sequence may have, the prompt included.

        Raises:
            InputError: there is one of that id.
        """
        with self._lock:
            if session_id in self._sessions:
                raise InputError(needed="a new session", given=repr(session_id), remedy="Close the other one first.")
            self._sessions[session_id] = Session(session_id, most_tokens)
        return f"{self.root}/session/{session_id}/v1"

    def close_session(self, session_id: str) -> Session:
        """End a conversation: requests for it are refused from now on, and one that is under way is waited for."""
        with self._lock:
            session = self._sessions.pop(session_id)
        with session.lock:
            session.closed = True
        return session

    def load(self, weights: Weights, version: int) -> None:
        """Sample with these weights from the next batch on."""
        with self._engine_lock:
            self._engine.load(weights, version)
            self.version = version

    def close(self) -> None:
        """Stop listening, and refuse requests on connections that are still open; the engine stays the caller's."""
        self._http.shutdown()
        self._http.server_close()
        with self._lock:
            self._closed = True
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    # --- what requests are answered with

    def models(self) -> dict[str, Any]:
        """One model, and the version of its weights."""
        return {"object": "list", "data": [{"id": self.name, "object": "model", "weights_version": self.version}]}

    def complete(self, request: protocol.CompletionRequest) -> dict[str, Any]:
        """The reply to a request that goes on from texts or tokens.

        Raises:
            RefusedError: it cannot be had.
        """
        given = request.prompt
        several = isinstance(given, list) and not all(isinstance(token, int) for token in given)
        prompts = [self._ids(each) for each in (given if several else [given])]
        ids = [f"{self._key(request)}/{i}" for i in range(len(prompts))]
        asked = [self._ask(Prompt(i, "", p), request) for i, p in zip(ids, prompts, strict=True)]
        completions = [completion for future in asked for completion in future.result()]
        choices = [protocol.text_choice(index, completion) for index, completion in enumerate(completions)]
        read = prompts if several else prompts[0]
        return protocol.reply("text_completion", choices, read, model=self.name, version=self.version)

    def chat(self, request: protocol.ChatRequest, session_id: str | None) -> dict[str, Any]:
        """The reply to a conversation.

        Args:
            request: with all messages so far.
            session_id: of the conversation that it is; None where it stands alone.

        Raises:
            RefusedError: it cannot be had, there is no such session, or it has another conversation.
        """
        of_template = self._of_template(request, may_differ=self.own_settings and session_id is None)
        if session_id is None:
            ids = self._rendered(request.messages, of_template)
            prompt = Prompt(self._key(request), "", ids, messages=tuple(request.messages))
            return self._chat_reply(request, ids, self._ask(prompt, request).result())
        gone = protocol.RefusedError(404, f"no session {session_id!r}", "not_found")
        with self._lock:
            session = self._sessions.get(session_id)
        if session is None:
            raise gone
        if not session.lock.acquire(blocking=False):
            session.failure = "two requests at a time in one session"
            raise protocol.RefusedError(409, session.failure, "conflict")
        try:
            if session.closed:  # since the request was read
                raise gone
            return self._go_on(session, request, of_template)
        finally:
            session.lock.release()

    def _go_on(self, session: Session, request: protocol.ChatRequest, of_template: dict[str, Any]) -> dict[str, Any]:
        """The next turn of a session, which stays as it was where none comes of it: the request may be repeated."""
        if request.n not in (None, 1):
            raise protocol.RefusedError(400, "n: a session has one completion a turn")
        messages, prompt, turns = request.messages, session.prompt, [*session.turns]
        if prompt is None:
            prompt = Prompt(session.id, "", self._rendered(messages, of_template), messages=tuple(messages))
        else:
            before, new = messages[: len(session.messages)], messages[len(session.messages) :]
            if not new or not all(map(_same, before, session.messages)):
                session.failure = session.failure or "the conversation was changed, and not gone on with"
                raise protocol.RefusedError(409, f"{session.failure}: it must begin with what was said", "conflict")
            completion, _ = turns[-1]
            assert self._turns is not None
            tokens = self._turns.between(completion, [{**m, "content": m["content"] or ""} for m in new])
            turns[-1] = (completion, Reply(messages=tuple(new), token_ids=tokens))
        ids = tokens_so_far(prompt, turns)
        most_new = self._options(request).max_new_tokens
        full = session.most_tokens is not None and len(ids) + most_new > session.most_tokens
        if full or len(turns) >= self.limits.max_turns:
            session.cut = True
            raise protocol.RefusedError(400, "the limit of tokens or turns is reached", "context_length_exceeded")
        [completion] = self._ask(Prompt(f"{session.id}/{len(turns)}", "", ids), request).result()
        session.cut, session.prompt = False, prompt
        session.turns = [*turns, (replace(completion, prompt_id=session.id), Reply())]
        session.messages = [*messages, {"role": "assistant", "content": completion.text}]
        return self._chat_reply(request, ids, [completion])

    def _chat_reply(self, request: protocol.ChatRequest, read: np.ndarray, said: list[Completion]) -> dict[str, Any]:
        tools = () if request.tool_choice == "none" else request.tools or ()
        names, choices = [tool["function"]["name"] for tool in tools], []
        for index, completion in enumerate(said):
            calls = tool_calls(completion.text, names, self.format) if names else []
            readable = [call for call in calls if not call.error][: 1 if request.parallel_tool_calls is False else None]
            pieces = self.tokenizer.convert_ids_to_tokens(completion.token_ids.tolist())
            choices.append(protocol.chat_choice(index, completion, readable, pieces))
        return protocol.reply("chat.completion", choices, read, model=self.name, version=self.version)

    def _of_template(self, request: protocol.ChatRequest, *, may_differ: bool) -> dict[str, Any]:
        """What the chat template is given besides the messages; the same in all turns of a session."""
        own = request.chat_template_kwargs or {}
        check_chat_template_kwargs(self.tokenizer, own)
        of_template = {**self.chat_template_kwargs, **own}
        if of_template != self.chat_template_kwargs and not may_differ:
            raise protocol.RefusedError(400, "chat_template_kwargs: settled by the recipe; leave it out")
        return of_template | ({"tools": request.tools} if request.tools else {})

    def _rendered(self, messages: Sequence[Mapping[str, Any]], of_template: Mapping[str, Any]) -> np.ndarray:
        from jinja2 import TemplateError

        if not self.tokenizer.chat_template:
            raise protocol.RefusedError(400, "this tokenizer has no chat template; use completions")
        try:
            text = self.tokenizer.apply_chat_template(
                [*messages], tokenize=False, add_generation_prompt=True, **of_template
            )
        except TemplateError as error:
            raise protocol.RefusedError(400, f"the chat template refuses the messages: {error}") from error
        return self._ids(text)

    def _ids(self, given: Any) -> np.ndarray:
        """Tokens of a prompt, which may be tokens already."""
        try:
            ids = self.tokenizer(given, add_special_tokens=False)["input_ids"] if isinstance(given, str) else given
        except Exception as error:  # the tokenizers library raises no class of its own
            raise protocol.RefusedError(400, f"prompt: {error}") from error
        most = len(self.tokenizer) - 1
        if not ids or (ids is given and not all(0 <= token <= most for token in ids)):
            raise protocol.RefusedError(400, f"prompt: one token at least is needed, and token ids from 0 to {most}")
        return np.array(ids, np.int64)

    def _options(self, request: protocol.Request) -> SamplingOptions:
        return request.options(self.options, num_tokens=len(self.tokenizer), may_differ=self.own_settings)

    def _key(self, request: protocol.Request) -> str:
        """What seeds a request that stands alone: its own seed, or its number."""
        if request.seed is not None:
            return f"seed-{request.seed}"
        with self._lock:
            self._number += 1
            return f"request-{self._number}"

    # --- sampling, in a thread of its own

    def _ask(self, prompt: Prompt, request: protocol.Request) -> "Future[list[Completion]]":
        asked = _Asked(prompt, request.n or 1, self._options(request), Future())
        with self._lock:  # what comes after the last entry of the queue would wait without end
            if self._closed:
                raise protocol.RefusedError(503, "the server is closed", "server_error")
            self._waiting.put(asked)
        return asked.answer

    def _sample(self) -> None:
        while (first := self._waiting.get()) is not None:
            together = [first]
            with suppress(Empty):  # what waits already is taken along, however late this thread comes to it
                while (another := self._waiting.get(timeout=self._gather)) is not None:
                    together.append(another)
                self._waiting.put(None)
            batches: dict[Any, list[_Asked]] = {}
            times: Counter[Any] = Counter()  # an engine is asked about a prompt once at a time
            for asked in together:
                alike = (asked.options, asked.num_samples)
                times[*alike, asked.prompt.id] += 1
                batches.setdefault((*alike, times[*alike, asked.prompt.id]), []).append(asked)
            for batch in batches.values():
                self._sample_batch(batch)

    def _sample_batch(self, batch: Sequence[_Asked]) -> None:
        prompts, num_samples = [asked.prompt for asked in batch], batch[0].num_samples
        try:
            with self._engine_lock:
                sampled = self._engine.sample(prompts, num_samples, batch[0].options, seed=self.seed)
            groups = checked(sampled, prompts, num_samples)
        except Exception as error:
            if len(batch) > 1 and isinstance(error, InputError | ConfigurationError):
                # one of them cannot be sampled, as where it outgrows the model: the others do not know it
                self._sample_batch(batch[: len(batch) // 2])
                self._sample_batch(batch[len(batch) // 2 :])
                return
            for asked in batch:
                asked.answer.set_exception(error)
            return
        for asked, group in zip(batch, groups, strict=True):
            asked.answer.set_result(group)


def _same(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    """Whether a message is the one that was said; space around its text does not count, nor do calls read out of it."""
    same_text = (theirs.get("content") or "").strip() == (ours.get("content") or "").strip()
    return theirs.get("role") == ours.get("role") and (same_text or bool(theirs.get("tool_calls")))
