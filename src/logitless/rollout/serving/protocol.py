"""OpenAI's requests and replies, with token ids beside the text.

A request refuses every field that the server does not implement, so that nothing is ignored silently. Null counts as
left out.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    ValidationInfo,
)

from logitless.errors import RefusedError
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.tool_calls import Call
from logitless.types import Completion


def _beside_stream(options: Any, request: ValidationInfo) -> Any:
    if options is not None and not request.data.get("stream"):
        raise ValueError("only beside stream")
    return options


def _with_one_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its text as one string."""
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(message.get("role"), str) or not isinstance(content, str | None):
        raise ValueError("each needs a role and a text as content, or parts that are texts: no image tower is loaded")
    return {**message, "content": content}


def _with_name(tool: dict[str, Any]) -> dict[str, Any]:
    about = tool.get("function")
    if not isinstance(about, dict) or not isinstance(about.get("name"), str):
        raise ValueError("each needs a function with a name")
    return tool


_Pairs = Annotated[dict[int, float], AfterValidator(lambda bias: tuple(bias.items()))]
_Texts = Annotated[tuple[str, ...], BeforeValidator(lambda text: (text,) if isinstance(text, str) else text)]


class StreamOptions(BaseModel, extra="forbid"):
    """Of a stream: ``include_usage`` asks for a last chunk without choices."""

    include_usage: StrictBool = False
    include_obfuscation: StrictBool | None = None  # accepted, without effect


class Request(BaseModel, extra="forbid"):
    """The fields of both endpoints. A field's description replaces pydantic's message in errors."""

    # accepted, without effect
    model: str | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None

    return_token_ids: bool | None = None
    n: StrictInt | None = Field(None, ge=1, le=1024)
    seed: int | None = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, AfterValidator(_beside_stream)] = Field(
        None, description="include_usage alone, true or false, beside stream"
    )
    # engines return the log-prob of the sampled token only
    logprobs: Literal[0, 1] | None = Field(None, description="0 or 1 is needed; only the sampled token's can be had")
    max_tokens: int | None = None
    max_completion_tokens: int | None = None

    # OpenAI's names of sampling options, and vLLM's beside them
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: _Pairs | None = None
    stop: _Texts | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    min_new_tokens: int | None = Field(None, alias="min_tokens")

    @classmethod
    def of(cls, body: bytes) -> Self:
        """Parse a body.

        Raises:
            RefusedError: names each wrong field and what it needs.
        """
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            wrong: dict[str, str] = {}
            for each in error.errors():
                name = str((*each["loc"], "body")[0])
                described = name in cls.model_fields and cls.model_fields[name].description
                unknown = each["type"] == "extra_forbidden" and len(each["loc"]) == 1
                wrong[name] = "unknown here" if unknown else described or each["msg"].removeprefix("Value error, ")
            raise RefusedError(400, "; ".join(f"{name}: {what}" for name, what in wrong.items())) from error

    def options(self, own: SamplingOptions, *, num_tokens: int, may_differ: bool) -> SamplingOptions:
        """The sampling options of this request: ``own`` with the request's values, and at most its ``max_new_tokens``.

        Args:
            own: the server's options.
            num_tokens: size of the tokenizer's vocabulary.
            may_differ: whether values other than those of ``own`` are allowed; fewer tokens always are.

        Raises:
            RefusedError: a value that may not differ, or a token id out of range.
            ConfigurationError: a value out of range.
        """
        names = [field.name for field in fields(SamplingOptions) if field.name != "max_new_tokens"]
        wanted = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.top_k in (0, -1):  # vLLM's way to keep every token
            wanted["top_k"] = None
        asked = (self.max_completion_tokens, self.max_tokens, own.max_new_tokens)
        most = next(number for number in asked if number is not None)
        options = replace(own, **wanted, max_new_tokens=min(most, own.max_new_tokens))
        named = [*options.stop_token_ids, *(token for token, _ in options.logit_bias)]
        if not all(0 <= token < num_tokens for token in named):
            raise RefusedError(400, f"logit_bias, stop_token_ids: token ids from 0 to {num_tokens - 1}")
        changed = [name for name in wanted if getattr(options, name) != getattr(own, name)]
        if changed and not may_differ:
            raise RefusedError(400, f"{', '.join(changed)}: sampling is settled by the recipe; leave it out")
        return options


class CompletionRequest(Request):
    """The body of a POST to ``completions``.

    Example:
        >>> CompletionRequest.of(b'{"prompt": [[3, 4], "ab"], "max_tokens": 9, "seed": null}').prompt
        [[3, 4], 'ab']
        >>> CompletionRequest.of(b'{"prompt": "ab", "n": 0, "best_of": 2}')
        Traceback (most recent call last):
        logitless.errors.RefusedError: n: Input should be greater than or equal to 1; best_of: ...
    """

    prompt: str | list[StrictInt] | list[str | list[StrictInt]] = Field(
        description="a text, a list of token ids or a list of these is needed"
    )
    echo: Literal[False] | None = Field(None, description="false is needed; the prompt's log-probs are not known")


class _PlainText(BaseModel, extra="forbid"):
    type: Literal["text"]


class ChatRequest(Request):
    """The body of a POST to ``chat/completions``; contents in several text parts are joined."""

    messages: list[Annotated[dict[str, Any], AfterValidator(_with_one_text)]] = Field(min_length=1)
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Annotated[dict[str, Any], AfterValidator(_with_name)]] | None = None
    tool_choice: Literal["auto", "none"] | None = Field(None, description="auto or none; no call can be forced")
    parallel_tool_calls: bool | None = None
    response_format: _PlainText | None = Field(None, description="type text is needed; no other format can be forced")
    top_logprobs: Literal[0] | None = Field(None, description="0 is needed; only the sampled token's can be had")


def reply(
    kind: str, choices: Sequence[Mapping[str, Any]], prompt_ids: Any, *, model: str, version: int
) -> dict[str, Any]:
    """A reply of these choices.

    Args:
        kind: ``text_completion`` or ``chat.completion``.
        choices: of ``text_choice`` or ``chat_choice``.
        prompt_ids: an array of token ids; a list of arrays if the request had a list of prompts.
        model: its name.
        version: of its weights.
    """
    single = isinstance(prompt_ids, np.ndarray)
    prompt_tokens = len(prompt_ids) if single else sum(map(len, prompt_ids))
    completion_tokens = sum(len(choice["token_ids"]) for choice in choices)
    return {
        "id": f"{kind}-{time.monotonic_ns()}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "prompt_token_ids": prompt_ids.tolist() if single else [ids.tolist() for ids in prompt_ids],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
        "weights_version": version,
    }


def text_choice(index: int, completion: Completion) -> dict[str, Any]:
    """A completion in the reply of ``completions``."""
    logp = completion.logp_sampler
    logprobs = None if logp is None else {"token_logprobs": logp.tolist()}
    return {**_choice(index, completion), "text": completion.text, "logprobs": logprobs}


def chat_choice(index: int, completion: Completion, calls: Sequence[Call], texts: Sequence[str]) -> dict[str, Any]:
    """A completion in the reply of ``chat/completions``.

    Args:
        index: in the reply.
        completion: to show.
        calls: tool calls parsed from its text.
        texts: of its tokens.
    """
    choice = _choice(index, completion)
    message: dict[str, Any] = {"role": "assistant", "content": completion.text}
    if calls:
        called = [{"name": call.name, "arguments": json.dumps(dict(call.arguments))} for call in calls]
        numbered = [{"id": f"{i:09d}", "type": "function", "function": each} for i, each in enumerate(called)]
        choice["finish_reason"], message["tool_calls"] = "tool_calls", numbered
    logp = completion.logp_sampler
    shown = [] if logp is None else zip(texts, logp.tolist(), strict=True)
    content = [{"token": text, "logprob": value, "bytes": _bytes(text), "top_logprobs": []} for text, value in shown]
    return {**choice, "message": message, "logprobs": {"content": content}}


def _bytes(text: str) -> list[int] | None:
    """In UTF-8; None for a part of a character, which has no text.

    Example:
        >>> _bytes("é"), _bytes("\ufffd")
        ([195, 169], None)
    """
    return None if "\ufffd" in text else [*text.encode()]


def _choice(index: int, completion: Completion) -> dict[str, Any]:
    tokens, version = completion.token_ids.tolist(), completion.weights_version
    return {"index": index, "finish_reason": completion.finish_reason, "token_ids": tokens, "weights_version": version}


def events(whole: Mapping[str, Any], *, include_usage: bool) -> bytes:
    """A whole reply as server-sent events: one chunk with everything, the usage if requested, and ``[DONE]``."""
    kind = "chat.completion.chunk" if whole["object"] == "chat.completion" else whole["object"]
    piece = {**whole, "object": kind, "choices": [*map(_streamed, whole["choices"])]}
    pieces: list[dict[str, Any]] = [{**piece, "usage": None}, {**piece, "choices": []}]
    if not include_usage:
        del piece["usage"]
        pieces = [piece]
    return "".join(f"data: {data}\n\n" for data in (*map(json.dumps, pieces), "[DONE]")).encode()


def _streamed(choice: Mapping[str, Any]) -> dict[str, Any]:
    """A choice of a chunk: a chat message becomes its ``delta``."""
    streamed = dict(choice)
    if message := streamed.pop("message", None):
        calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", ()))]
        streamed["delta"] = {**message, "tool_calls": calls} if calls else message
    return streamed


def error(refused: RefusedError) -> dict[str, Any]:
    """The body of a reply whose status is not 200."""
    return {"error": {"message": str(refused), "type": refused.code, "code": refused.code}}
