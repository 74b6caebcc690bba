"""An engine behind an OpenAI endpoint on loopback: who asks sees text, who trains sees the tokens.

    program ──HTTP──> /v1/chat/completions            a conversation of its own with every request
            ──HTTP──> /session/<id>/v1/chat/completions   one conversation that grows; its tokens are kept
                          │ requests that come together are sampled together
                          v
                        Engine

In a session every turn goes on from the tokens of the one before it: nothing that the policy said is tokenized again,
and ``episode`` gives all of them with their log-probs and the version of their weights. Requests wait for each other's
batch; a completion depends on the seed, the session and its turn alone. Gives up streaming, and any address but
loopback.
"""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, Queue
from types import MappingProxyType
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError
from transformers import PreTrainedTokenizerBase

from logitless.errors import ConfigurationError, InputError
from logitless.rollout.chat import ChatTurns, check_chat_template_kwargs
from logitless.rollout.engine import Engine, Weights
from logitless.rollout.environment import Limits, Reply, checked, joined, tokens_so_far
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.tool_calls import Call, Format, tool_calls
from logitless.types import Completion, Episode, Prompt

_OPTIONS = TypeAdapter(SamplingOptions)
MAX_BODY_BYTES = 8 << 20
_HOSTS = ("127.0.0.1", "localhost")
_SETTINGS = {
    name: name
    for name in (
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("logit_bias", "stop", "stop_token_ids"),
    )
} | {"min_tokens": "min_new_tokens"}
"""Parameters of a request (OpenAI's, and vLLM's beside them) and the sampling options that they are."""
_TAKEN = {
    "model",
    "messages",
    "prompt",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "tools",
    "seed",
    "user",
    "logprobs",
}
_TAKEN |= {
    "top_logprobs",
    "return_token_ids",
    "stream",
    "stream_options",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
    *_SETTINGS,
}


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


class _RefusedError(Exception):
    """A request that is answered with a status other than 200."""

    def __init__(self, status: int, message: str, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code = status, code


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
        self._engine_lock, self._sessions_lock, self._closing_lock = (threading.Lock() for _ in range(3))
        self._closed = False
        self._sessions: dict[str, Session] = {}
        self._number = 0
        can_chat = template is not None or bool(tokenizer.chat_template)
        of_template: dict[str, Any] = {"template": template, "chat_template_kwargs": chat_template_kwargs}
        self._turns = ChatTurns(tokenizer, **of_template) if can_chat else None
        self.chat_template_kwargs = chat_template_kwargs
        self._waiting: Queue[_Asked | None] = Queue()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._http.daemon_threads = True
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

    @property
    def root(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def url(self) -> str:
        """The base url of an OpenAI client whose requests stand alone."""
        return f"{self.root}/v1"

    def open_session(self, session_id: str, *, most_tokens: int | None = None) -> str:
        """Begin a conversation; returns the base url of the OpenAI client that has it.

        Args:
            session_id: letters, digits and ``-_.~``, new.
            most_tokens: that its sequence may have, the prompt included.

        Raises:
            InputError: there is one of that id.
        """
        with self._sessions_lock:
            if session_id in self._sessions:
                raise InputError(needed="a new session", given=repr(session_id), remedy="Close the other one first.")
            self._sessions[session_id] = Session(session_id, most_tokens)
        return f"{self.root}/session/{session_id}/v1"

    def close_session(self, session_id: str) -> Session:
        """End a conversation: requests for it are refused from now on, and one that is under way is waited for."""
        with self._sessions_lock:
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
        with self._closing_lock:
            self._closed = True
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    # --- what requests are answered with

    def answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to a POST, as JSON."""
        parts = path.strip("/").split("/")
        session = None
        if parts[:1] == ["session"] and len(parts) > 2:
            with self._sessions_lock:
                session = self._sessions.get(parts[1])
            if session is None:
                raise _RefusedError(404, f"no session {parts[1]!r}", "not_found")
            parts = parts[2:]
        if unknown := sorted(set(body) - _TAKEN):
            raise _RefusedError(400, f"unknown parameters: {', '.join(unknown)}")
        _check_what_is_given(body)
        if parts == ["v1", "completions"] and session is None:
            return self._complete(body)
        if parts == ["v1", "chat", "completions"]:
            return self._chat(body, session)
        raise _RefusedError(404, f"no {path}", "not_found")

    def models(self) -> dict[str, Any]:
        """The reply to ``GET /v1/models``: one model, and the version of its weights."""
        return {"object": "list", "data": [{"id": self.name, "object": "model", "weights_version": self.version}]}

    def _complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        given = body.get("prompt")
        several = isinstance(given, list) and not all(type(token) is int for token in given)
        prompts = [self._ids(each) for each in (given if several else [given])]  # type: ignore[union-attr]
        ids = [f"{self._key(body)}/{i}" for i in range(len(prompts))]
        asked = [self._ask(Prompt(i, "", p), body) for i, p in zip(ids, prompts, strict=True)]
        choices: list[dict[str, Any]] = []
        for completion in (c for future in asked for c in future.result()):
            values = completion.logp_sampler
            logprobs = None if values is None else {"token_logprobs": values.tolist()}
            choices.append(
                {
                    "index": len(choices),
                    "text": completion.text,
                    "finish_reason": completion.finish_reason,
                    "token_ids": completion.token_ids.tolist(),
                    "logprobs": logprobs,
                    "weights_version": completion.weights_version,
                }
            )
        read = [ids.tolist() for ids in prompts]
        return self._reply("text_completion", choices, read if several else read[0], sum(map(len, prompts)))

    def _chat(self, body: Mapping[str, Any], session: Session | None) -> dict[str, Any]:
        messages = body.get("messages")
        if not (isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)):
            raise _RefusedError(400, "messages: a list of messages is needed")
        plain, of_template = [_plain(message) for message in messages], self._of_template(body, session)
        if session is None:
            prompt = Prompt(self._key(body), "", self._rendered(plain, of_template), messages=tuple(plain))
            completions = self._ask(prompt, body).result()
            return self._chat_reply(completions, prompt.token_ids, body)
        if not session.lock.acquire(blocking=False):
            session.failure = "two requests at a time in one session"
            raise _RefusedError(409, session.failure, "conflict")
        try:
            if session.closed:  # since the request was read
                raise _RefusedError(404, f"no session {session.id!r}", "not_found")
            return self._go_on(session, plain, body, of_template)
        finally:
            session.lock.release()

    def _go_on(
        self, session: Session, messages: list[dict[str, Any]], body: Mapping[str, Any], of_template: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The next turn of a session, which stays as it was where none comes of it: the request may be repeated."""
        if body.get("n", 1) != 1:
            raise _RefusedError(400, "n: a session has one completion a turn")
        prompt, turns = session.prompt, [*session.turns]
        if prompt is None:
            prompt = Prompt(session.id, "", self._rendered(messages, of_template), messages=tuple(messages))
        else:
            before, new = messages[: len(session.messages)], messages[len(session.messages) :]
            if not new or not all(_same(a, b) for a, b in zip(before, session.messages, strict=True)):
                session.failure = session.failure or "the conversation was changed, and not gone on with"
                raise _RefusedError(409, f"{session.failure}: it must begin with what was said", "conflict")
            completion, _ = turns[-1]
            assert self._turns is not None
            tokens = self._turns.between(completion, [{**m, "content": m["content"] or ""} for m in new])
            turns[-1] = (completion, Reply(messages=tuple(new), token_ids=tokens))
        ids = tokens_so_far(prompt, turns)
        options = self._options(body)
        full = session.most_tokens is not None and len(ids) + options.max_new_tokens > session.most_tokens
        if full or len(turns) >= self.limits.max_turns:
            session.cut = True
            raise _RefusedError(400, "the conversation is at its limit of tokens or turns", "context_length_exceeded")
        [completion] = self._ask(Prompt(f"{session.id}/{len(turns)}", "", ids), body).result()
        session.cut, session.prompt = False, prompt
        session.turns = [*turns, (replace(completion, prompt_id=session.id), Reply())]
        session.messages = [*messages, {"role": "assistant", "content": completion.text}]
        return self._chat_reply([completion], ids, body)

    def _chat_reply(
        self, completions: Sequence[Completion], read: np.ndarray, body: Mapping[str, Any]
    ) -> dict[str, Any]:
        tools = () if body.get("tool_choice") == "none" else body.get("tools") or ()
        names = [tool["function"]["name"] for tool in tools]
        most_calls = 1 if body.get("parallel_tool_calls") is False else None
        choices = []
        for index, completion in enumerate(completions):
            calls = tool_calls(completion.text, names, self.format) if names else []
            message: dict[str, Any] = {"role": "assistant", "content": completion.text}
            if readable := [call for call in calls if not call.error][:most_calls]:
                message["tool_calls"] = [_openai_call(call, number) for number, call in enumerate(readable)]
            values, ids = completion.logp_sampler, completion.token_ids.tolist()
            pieces = self.tokenizer.convert_ids_to_tokens(ids)
            shown = [] if values is None else zip(pieces, values.tolist(), strict=True)
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "finish_reason": "tool_calls" if readable else completion.finish_reason,
                    "token_ids": ids,
                    "logprobs": {
                        "content": [
                            {"token": token, "logprob": logp, "bytes": None, "top_logprobs": []}
                            for token, logp in shown
                        ]
                    },
                    "weights_version": completion.weights_version,
                }
            )
        return self._reply("chat.completion", choices, read.tolist(), len(read))

    def _reply(self, kind: str, choices: list[dict[str, Any]], read: Any, num_read: int) -> dict[str, Any]:
        said = sum(len(choice["token_ids"]) for choice in choices)
        return {
            "id": f"{kind}-{time.monotonic_ns()}",
            "object": kind,
            "created": int(time.time()),
            "model": self.name,
            "choices": choices,
            "prompt_token_ids": read,
            "usage": {"prompt_tokens": num_read, "completion_tokens": said, "total_tokens": num_read + said},
            "weights_version": self.version,
        }

    def _of_template(self, body: Mapping[str, Any], session: Session | None) -> dict[str, Any]:
        """What the chat template is given besides the messages; the same in all turns of a session."""
        own = body.get("chat_template_kwargs") or {}
        if not isinstance(own, dict):
            raise _RefusedError(400, "chat_template_kwargs: an object is needed")
        check_chat_template_kwargs(self.tokenizer, own)
        of_template = {**self.chat_template_kwargs, **own}
        if of_template != self.chat_template_kwargs and (session is not None or not self.own_settings):
            raise _RefusedError(400, "chat_template_kwargs: settled by the recipe; leave it out")
        if tools := body.get("tools"):
            of_template["tools"] = tools
        return of_template

    def _rendered(self, messages: Sequence[Mapping[str, Any]], of_template: Mapping[str, Any]) -> np.ndarray:
        from jinja2 import TemplateError

        if not self.tokenizer.chat_template:
            raise _RefusedError(400, "this tokenizer has no chat template; use completions")
        try:
            text = self.tokenizer.apply_chat_template(
                [*messages], tokenize=False, add_generation_prompt=True, **of_template
            )
        except TemplateError as error:
            raise _RefusedError(400, f"the chat template refuses the messages: {error}") from error
        return self._ids(text)

    def _ids(self, given: Any) -> np.ndarray:
        """Tokens of a prompt, which may be tokens already."""
        if isinstance(given, list) and given and all(type(token) is int for token in given):
            if not all(0 <= token < len(self.tokenizer) for token in given):
                raise _RefusedError(400, f"prompt: token ids from 0 to {len(self.tokenizer) - 1} are needed")
            return np.array(given, np.int64)
        if not isinstance(given, str) or not given:
            raise _RefusedError(400, "prompt: a text, a list of token ids or a list of these is needed")
        try:
            return np.array(self.tokenizer(given, add_special_tokens=False)["input_ids"], np.int64)
        except Exception as error:  # the tokenizers library raises no class of its own
            raise _RefusedError(400, f"prompt: {error}") from error

    def _options(self, body: Mapping[str, Any]) -> SamplingOptions:
        wanted: dict[str, Any] = {}
        most = body.get("max_tokens") if (given := body.get("max_completion_tokens")) is None else given
        for theirs, ours in _SETTINGS.items():
            if body.get(theirs) is not None:
                wanted[ours] = body[theirs]
        if isinstance(wanted.get("stop"), str):
            wanted["stop"] = (wanted["stop"],)
        if wanted.get("top_k") in (0, -1):  # as vLLM writes that all are kept
            wanted["top_k"] = None
        if isinstance(wanted.get("logit_bias"), dict):
            wanted["logit_bias"] = tuple(wanted["logit_bias"].items())
        if most is not None:
            wanted["max_new_tokens"] = most
        try:
            options = _OPTIONS.validate_python(asdict(self.options) | wanted)
        except ValidationError as error:
            said = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}".lstrip(": ") for e in error.errors())
            raise _RefusedError(400, said) from error
        options = replace(options, max_new_tokens=min(options.max_new_tokens, self.options.max_new_tokens))
        named = [*options.stop_token_ids, *(token for token, _ in options.logit_bias)]
        if not all(0 <= token < len(self.tokenizer) for token in named):
            raise _RefusedError(400, f"logit_bias, stop_token_ids: token ids from 0 to {len(self.tokenizer) - 1}")
        changed = [n for n in wanted if n != "max_new_tokens" and getattr(options, n) != getattr(self.options, n)]
        if changed and not self.own_settings:
            raise _RefusedError(400, f"{', '.join(changed)}: sampling is settled by the recipe; leave it out")
        return options

    def _key(self, body: Mapping[str, Any]) -> str:
        """What seeds a request that stands alone: its own seed, or its number."""
        if body.get("seed") is not None:
            return f"seed-{body['seed']}"
        with self._sessions_lock:
            self._number += 1
            return f"request-{self._number}"

    # --- sampling, in a thread of its own

    def _ask(self, prompt: Prompt, body: Mapping[str, Any]) -> "Future[list[Completion]]":
        num_samples = body.get("n", 1)
        if type(num_samples) is not int or not 1 <= num_samples <= 1024:
            raise _RefusedError(400, "n: a whole number from 1 is needed")
        answer: Future[list[Completion]] = Future()
        asked = _Asked(prompt, num_samples, self._options(body), answer)
        with self._closing_lock:  # what comes after the last entry of the queue would wait without end
            if self._closed:
                raise _RefusedError(503, "the server is closed", "server_error")
            self._waiting.put(asked)
        return answer

    def _sample(self) -> None:
        while (first := self._waiting.get()) is not None:
            together = [first]
            end = time.monotonic() + self._gather
            while True:
                try:  # what waits already is taken along, however late this thread comes to it
                    another = self._waiting.get(timeout=max(0.0, end - time.monotonic()))
                except Empty:
                    break
                if another is None:
                    self._waiting.put(None)
                    break
                together.append(another)
                end = time.monotonic() + self._gather
            batches: dict[Any, list[_Asked]] = {}
            for asked in together:
                place = (asked.options, asked.num_samples)
                same = sum(other.prompt.id == asked.prompt.id for other in batches.get((*place, 0), ()))
                batches.setdefault((*place, same), []).append(asked)
            for (options, num_samples, _), batch in batches.items():
                self._sample_batch(batch, options, num_samples)

    def _sample_batch(self, batch: Sequence[_Asked], options: SamplingOptions, num_samples: int) -> None:
        try:
            with self._engine_lock:
                prompts = [asked.prompt for asked in batch]
                sampled = self._engine.sample(prompts, num_samples, options, seed=self.seed)
            groups = checked(sampled, prompts, num_samples)
        except Exception as error:
            if len(batch) > 1 and isinstance(error, InputError | ConfigurationError):
                # one of them cannot be sampled, as where it outgrows the model: the others do not know it
                half = len(batch) // 2
                for part in (batch[:half], batch[half:]):
                    self._sample_batch(part, options, num_samples)
                return
            for asked in batch:
                asked.answer.set_exception(error)
            return
        for asked, group in zip(batch, groups, strict=True):
            asked.answer.set_result(group)


def _check_what_is_given(body: Mapping[str, Any]) -> None:
    """Refuse what a reply cannot have: nothing that a client asks for is left out in silence."""
    # an engine says the log-prob of the token that it sampled, and of no other
    if body.get("top_logprobs"):
        raise _RefusedError(400, "top_logprobs: only the sampled token's log-prob can be had; leave it out, or 0")
    if body.get("logprobs") not in (None, False, True, 0, 1):
        raise _RefusedError(400, "logprobs: only the sampled token's log-prob can be had; 0 or 1 is needed")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise _RefusedError(400, "tool_choice: auto or none is needed; no call can be forced")
    of_stream = body.get("stream_options")
    if of_stream is not None and not (body.get("stream") and isinstance(of_stream, dict)):
        raise _RefusedError(400, "stream_options: an object is needed, beside stream")


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its text as one string."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if not isinstance(message.get("role"), str) or not isinstance(content, str | None):
        raise _RefusedError(400, "messages: each needs a role and a text as content")
    return {**message, "content": content}


def _same(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    """Whether a message is the one that was said; space around its text does not count, nor do calls read out of it."""
    same_text = (theirs.get("content") or "").strip() == (ours.get("content") or "").strip()
    return theirs.get("role") == ours.get("role") and (same_text or bool(theirs.get("tool_calls")))


def _openai_call(call: Call, number: int) -> dict[str, Any]:
    about = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
    return {"id": f"{number:09d}", "type": "function", "function": about}


def _handler(server: EngineServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/session/"):
                path = "/" + "/".join(path.split("/")[3:])
            if path == "/v1/models":
                self._say(200, server.models())
            elif path == "/health":
                self._say(200, {"weights_version": server.version})
            else:
                self._say(404, _error(f"no {self.path}", "not_found"))

        def do_POST(self) -> None:
            try:
                if (self.headers.get("Host") or "").rpartition(":")[0] not in _HOSTS:
                    raise _RefusedError(403, "asked for by another name than loopback's", "forbidden")
                length = int(self.headers.get("Content-Length") or 0)
                if length > MAX_BODY_BYTES:
                    self.close_connection = True
                    raise _RefusedError(413, f"over {MAX_BODY_BYTES} bytes")
                try:
                    body = json.loads(self.rfile.read(length))
                except (ValueError, RecursionError) as error:
                    raise _RefusedError(400, f"no JSON: {error}") from error
                if not isinstance(body, dict):
                    raise _RefusedError(400, "a JSON object is needed")
                reply = server.answer(self.path.partition("?")[0], body)
                if body.get("stream"):
                    asked = (body.get("stream_options") or {}).get("include_usage", False)
                    self._send(200, "text/event-stream", _events(reply, include_usage=asked))
                else:
                    self._say(200, reply)
            except _RefusedError as refused:
                self._say(refused.status, _error(str(refused), refused.code))
            except (InputError, ConfigurationError) as error:
                self._say(400, _error(str(error), "invalid_request_error"))
            except Exception as error:
                self._say(500, _error(f"{type(error).__name__}: {error}", "server_error"))

        def _say(self, status: int, content: Mapping[str, Any]) -> None:
            self._send(status, "application/json", json.dumps(content).encode())

        def _send(self, status: int, kind: str, said: bytes) -> None:
            try:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)
            except OSError:
                self.close_connection = True  # whoever asked is gone

        def log_message(self, *_: Any) -> None:
            """Nothing is logged: what the policy says belongs to the run."""

    return Handler


def _events(reply: Mapping[str, Any], *, include_usage: bool) -> bytes:
    """A whole reply as a client that asked for a stream reads it: all at once, then what it took if that was asked for,
    then the end."""
    chat = reply["object"] == "chat.completion"
    choices = [_streamed(choice) if chat else choice for choice in reply["choices"]]
    whole = {**reply, "object": "chat.completion.chunk" if chat else reply["object"], "choices": choices}
    pieces = [{**whole, "usage": None}, {**whole, "choices": []}]
    if not include_usage:
        del whole["usage"]
        pieces = [whole]
    return b"".join(b"data: %s\n\n" % each for each in (*(json.dumps(x).encode() for x in pieces), b"[DONE]"))


def _streamed(choice: Mapping[str, Any]) -> dict[str, Any]:
    """A choice whose message is the one piece that comes."""
    message = dict(choice["message"])
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": number, **call} for number, call in enumerate(message["tool_calls"])]
    return {**{name: value for name, value in choice.items() if name != "message"}, "delta": message}


def _error(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": code, "code": code}}
