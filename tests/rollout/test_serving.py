"""An engine behind an endpoint, asked over HTTP: clients see text, and the episode has the sampled tokens."""

import http.client
import json
import math
import os
import re
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from queue import Empty

import pytest
from tokenizers import Tokenizer, decoders, models
from torch import nn
from transformers import PreTrainedTokenizerFast

from logitless.errors import ConfigurationError, EngineError, InputError
from logitless.rollout.completions import check_prompts
from logitless.rollout.engine import Weights
from logitless.rollout.environment import Driver, Limits
from logitless.rollout.environments.harness import Harness, HarnessEpisodes
from logitless.rollout.environments.options import environment_of
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.serving.protocol import ChatRequest, CompletionRequest
from logitless.types import Completion, Prompt
from tests.rollout.engines import StandIn
from tests.rollout.templates import chat_tokenizer

pytest.importorskip("starlette", reason="needs pip install 'logitless[serve]'")

from logitless.rollout.serving.server import MAX_BODY_BYTES, EngineServer

OPTIONS = SamplingOptions(max_new_tokens=40)
WEIGHTS = Weights(nn.Module(), lambda: iter(()))
QUESTION = [{"role": "user", "content": "ok?"}]


class Letters(StandIn):
    """Samples "the 22" and the number of prompt tokens, a letter a token; records every call."""

    def __init__(self, tokenizer):
        self.tokenizer, self.calls = tokenizer, []

    def sample(self, prompts, num_samples, options, *, seed):
        self.calls.append([(p.id, tuple(p.token_ids.tolist())) for p in prompts])
        return [[self.said(p) for _ in range(num_samples)] for p in prompts]

    def said(self, prompt):
        text = f"the 22 {len(prompt.token_ids)}"
        ids = self.tokenizer.convert_tokens_to_ids([*text, "<|im_end|>"])
        logp = tuple(-0.5 - i for i in range(len(ids)))
        return Completion(prompt.id, tuple(ids), text, "stop", logp, weights_version=self.version)


def post(url, **body):
    request = urllib.request.Request(url, json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=300) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def complete(url, prompt="ok", **body):
    return post(f"{url}/completions", prompt=prompt, **body)


def chat(url, messages=QUESTION, **body):
    return post(f"{url}/chat/completions", messages=messages, **body)


@pytest.fixture
def tokenizer():
    return chat_tokenizer("qwen")


def serving(tokenizer, kind=Letters, **settings):
    return EngineServer(kind(tokenizer), tokenizer, OPTIONS, seed=0, **settings)


@pytest.fixture
def server(tokenizer):
    with serving(tokenizer, gather_seconds=0.05) as made:
        yield made


def test_a_completion_has_tokens_log_probs_and_the_version_of_its_weights(server, tokenizer):
    server.load(WEIGHTS, 7)
    status, reply = complete(server.url, "the ok.", n=2, max_tokens=9)
    assert status == 200
    assert reply["prompt_token_ids"] == tokenizer("the ok.", add_special_tokens=False)["input_ids"]
    first, second = reply["choices"]
    assert first["token_ids"] == second["token_ids"]
    assert len(first["token_ids"]) == len(first["logprobs"]["token_logprobs"])
    assert (first["weights_version"], reply["weights_version"], first["finish_reason"]) == (7, 7, "stop")
    status, again = complete(server.url, [reply["prompt_token_ids"], [5, 6]])
    assert again["prompt_token_ids"] == [reply["prompt_token_ids"], [5, 6]]
    assert [choice["index"] for choice in again["choices"]] == [0, 1]


def test_a_chat_reads_the_template_and_says_what_tools_it_wants(server, tokenizer):
    status, reply = chat(server.url, model="x")
    assert status == 200
    text = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert reply["prompt_token_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
    choice = reply["choices"][0]
    assert choice["message"]["content"].startswith("the 22")
    assert [each["logprob"] for each in choice["logprobs"]["content"]][:2] == [-0.5, -1.5]
    assert all(each["top_logprobs"] == [] for each in choice["logprobs"]["content"])
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    server._engine.said = lambda prompt: Completion(prompt.id, (5,), call, "stop")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    _, reply = chat(server.url, tools=tools)
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}


@pytest.mark.parametrize(
    ("decoder", "pieces", "shown"),
    [
        (decoders.ByteLevel(), ["Ġok", "Ã", "Ã©"], [(" ok", [32, 111, 107]), ("\ufffd", None), ("é", [195, 169])]),
        (decoders.Metaspace(), ["▁ok", "é"], [(" ok", [32, 111, 107]), ("é", [195, 169])]),
        (
            decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            ),
            ["▁ok", "▁▁", "<0x20>"],
            [(" ok", [32, 111, 107]), ("  ", [32, 32]), (" ", [32])],
        ),
    ],
)
def test_the_log_probs_of_a_chat_are_beside_the_text_and_the_bytes_of_each_token(decoder, pieces, shown):
    made = Tokenizer(models.BPE({piece: number for number, piece in enumerate(["a", "?", *pieces])}, []))
    made.decoder = decoder
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    tokenizer.chat_template = "?"
    with serving(tokenizer) as server:
        ids = tuple(range(2, len(pieces) + 2))
        server._engine.said = lambda prompt: Completion(prompt.id, ids, "unused", "stop", (-0.5,) * len(ids))
        _, reply = chat(server.url)
    assert [(each["token"], each["bytes"]) for each in reply["choices"][0]["logprobs"]["content"]] == shown


def test_a_session_goes_on_from_its_own_tokens_and_gives_them_to_the_trainer(server, tokenizer):
    url = server.open_session("s")
    _, first = chat(url)
    server.load(WEIGHTS, 3)
    said = first["choices"][0]["message"]
    more = [*QUESTION, said, {"role": "tool", "content": "4"}, {"role": "tool", "content": None}]
    _, second = chat(url, more)
    read, drawn = first["prompt_token_ids"], first["choices"][0]["token_ids"]
    assert second["prompt_token_ids"][: len(read) + len(drawn)] == read + drawn
    as_text = tokenizer(said["content"], add_special_tokens=False)["input_ids"]
    assert len(as_text) < len(drawn) - 1  # their text would be other tokens
    episode = server.close_session("s").episode(0.5)
    completion = episode.completion
    assert list(completion.token_ids) == second["prompt_token_ids"][len(read) :] + second["choices"][0]["token_ids"]
    assert completion.token_ids[completion.trained].tolist() == drawn + second["choices"][0]["token_ids"]
    assert set(completion.token_versions) == {0, 3}
    assert completion.weights_version == 0
    assert episode.turn_rewards == (0.0, 0.5)
    assert [message["role"] for message in episode.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    status, _ = chat(url)
    assert status == 404


def test_a_session_that_is_closed_while_it_is_asked_ends_with_what_is_being_said(tokenizer):
    asked, may_go_on, answered = threading.Event(), threading.Event(), []

    class Slow(Letters):
        def said(self, prompt):
            asked.set()
            assert may_go_on.wait(300)
            return super().said(prompt)

    with serving(tokenizer, Slow) as server:
        url = server.open_session("s")
        thread = threading.Thread(target=lambda: answered.append(chat(url)))
        thread.start()
        assert asked.wait(300)
        threading.Timer(0.1, may_go_on.set).start()
        session = server.close_session("s")  # as a harness is done that gave its request up
        [(completion, _)] = session.turns
        thread.join()
        assert answered[0][1]["choices"][0]["token_ids"] == list(completion.token_ids)
        session.closed, server._sessions["s"] = True, session  # found by a request just before it is closed
        assert chat(url)[0] == 404


def test_a_conversation_that_was_changed_cannot_be_trained_on(server):
    url = server.open_session("s")
    chat(url)
    other = [*QUESTION, {"role": "assistant", "content": "something else"}, {"role": "user", "content": "ok"}]
    status, reply = chat(url, other)
    assert status == 409
    assert "begin with what was said" in reply["error"]["message"]
    assert "changed" in server.close_session("s").episode().failure


def test_a_session_ends_at_its_limits(tokenizer):
    with serving(tokenizer, limits=Limits(max_turns=1)) as server:
        url = server.open_session("s")
        _, first = chat(url)
        more = [*QUESTION, first["choices"][0]["message"], {"role": "user", "content": "ok"}]
        status, reply = chat(url, more)
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
        episode = server.close_session("s").episode()
        assert (episode.completion.finish_reason, episode.failure) == ("length", "")
        short = server.open_session("short", most_tokens=41)
        status, reply = chat(short)
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
        status, _ = chat(short, max_tokens=5)
        assert status == 200


def asked_by_four(server):
    """Four sessions ask at once; the calls of the engine, as the ids of their prompts."""
    urls = [server.open_session(f"s{i}") for i in range(4)]
    with ThreadPoolExecutor(4) as threads:
        assert [status for status, _ in threads.map(chat, urls)] == [200] * 4
    calls = [sorted(prompt_id for prompt_id, _ in call) for call in server._engine.calls]
    assert sorted(prompt_id for call in calls for prompt_id in call) == [f"s{i}/0" for i in range(4)]
    return calls


def test_requests_that_come_together_are_sampled_together(tokenizer):
    waited = []

    def get(timeout=None):
        if timeout is None:
            return real()
        waited.append(timeout)
        if len(waited) == 4:  # the first has waited for three others, and nobody else comes
            raise Empty
        return real(timeout=timeout)

    with serving(tokenizer, gather_seconds=1000.0) as server:
        real, server._waiting.get = server._waiting.get, get
        assert len(asked_by_four(server)) == 1
    assert all(500 < seconds <= 1000 for seconds in waited)


def test_requests_that_wait_for_the_engine_are_sampled_together_however_late_they_are_taken(tokenizer):
    come = threading.Semaphore(0)

    class Busy(Letters):
        def sample(self, *arguments, **options):
            for _ in range(0 if self.calls else 4):  # until the others wait
                assert come.acquire(timeout=300)
            return super().sample(*arguments, **options)

    with serving(tokenizer, Busy, gather_seconds=1e-9) as server:
        put = server._waiting.put
        server._waiting.put = lambda asked: (put(asked), come.release())
        first, *others = asked_by_four(server)
    assert len(others) == (len(first) < 4)


def test_an_engine_is_asked_about_a_prompt_once_at_a_time_though_equal_requests_come_together(tokenizer):
    with serving(tokenizer, gather_seconds=1.0) as server, ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(complete, server.url, seed=5) for _ in range(3)]
        assert [each.result()[0] for each in asked] == [200] * 3
    assert [len(call) for call in server._engine.calls] == [1] * 3


def test_a_seed_of_ones_own_gives_the_same_again_and_without_one_every_request_is_another(server):
    for body in ({"seed": 5}, {"seed": 5}, {}, {}):
        complete(server.url, **body)
    ids = [prompt_id for call in server._engine.calls for prompt_id, _ in call]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3


@pytest.fixture(scope="module")
def refusing():
    with serving(chat_tokenizer("qwen")) as made:
        yield made


@pytest.mark.parametrize("ask", [complete, chat])
@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"best_of": 3}, "best_of: unknown"),
        ({"n": 0}, "n:"),
        ({"temperature": -1.0}, "temperature"),
        ({"max_tokens": 0}, "max_new_tokens of at least 1"),
        ({"max_tokens": 9, "max_completion_tokens": 0}, "max_new_tokens of at least 1"),
        ({"min_tokens": 50}, "min_new_tokens"),
        ({"logit_bias": {"1000000": 1}}, "token ids from 0"),
        ({"stop_token_ids": [10**6]}, "token ids from 0"),
        ({"logprobs": 2}, "only the sampled token"),
        ({"stream_options": {"include_usage": True}}, "beside stream"),
        ({"stream_options": {}, "stream": False}, "beside stream"),
        ({"stream_options": {"include_obfuscation": True}}, "beside stream"),
        ({"stream_options": {"continuous_usage_stats": True}, "stream": True}, "stream_options: include_usage alone"),
        ({"stream_options": {"include_usage": "yes"}, "stream": True}, "stream_options: include_usage alone"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(refusing, ask, more, named):
    status, reply = ask(refusing.url, **more)
    assert (status, reply["error"]["code"]) == (400, "invalid_request_error")
    assert named in reply["error"]["message"]
    assert refusing._engine.calls == []


@pytest.mark.parametrize(
    ("ask", "body", "named"),
    [
        (complete, {"prompt": None}, "prompt: a text, a list of token ids or a list of these"),
        (complete, {"prompt": [True]}, "prompt: a text, a list of token ids or a list of these"),
        (complete, {"prompt": ""}, "prompt: one token at least"),
        (complete, {"prompt": []}, "prompt: one token at least"),
        (complete, {"prompt": ["ok", ""]}, "prompt: one token at least"),
        (complete, {"prompt": [10**9]}, "token ids from 0"),
        (complete, {"prompt": [[5], [-1]]}, "token ids from 0"),
        (complete, {"messages": QUESTION}, "messages"),
        (complete, {"echo": True}, "echo: false is needed"),
        (chat, {"messages": []}, "messages"),
        (chat, {"messages": [{"content": "ok?"}]}, "messages: each needs a role and a text"),
        (chat, {"messages": [{"role": "user", "content": 5}]}, "messages: each needs a role and a text"),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "parts that are texts",
        ),
        (chat, {"response_format": {"type": "json_object"}}, "no other format can be forced"),
        (chat, {"prompt": "ok"}, "prompt"),
        (chat, {"top_logprobs": 1}, "only the sampled token"),
        (chat, {"tool_choice": "required"}, "no call can be forced"),
        (chat, {"tools": [{"type": "function"}]}, "tools: each needs a function with a name"),
        (chat, {"tools": [{"function": {"name": 5}}]}, "tools: each needs a function with a name"),
    ],
)
def test_what_one_endpoint_cannot_do_is_refused_in_words(refusing, ask, body, named):
    test_what_cannot_be_done_is_refused_in_words(refusing, ask, body, named)


def test_null_is_as_good_as_left_out_and_what_asks_for_nothing_more_is_taken(server):
    for ask, kind in ((complete, CompletionRequest), (chat, ChatRequest)):
        names = {field.alias or name for name, field in kind.model_fields.items()} - {"prompt", "messages"}
        assert ask(server.url, **dict.fromkeys(names))[0] == 200
        usual = {"model": "x", "user": "me", "stream": False, "return_token_ids": True, "n": 1}
        usual |= {"metadata": {"run": "5"}, "store": True, "service_tier": "auto"}
        for logprobs in (False, True, 0, 1):
            assert ask(server.url, **usual, logprobs=logprobs)[0] == 200
    usual = {"tool_choice": "auto", "top_logprobs": 0, "parallel_tool_calls": True, "tools": []}
    usual |= {"response_format": {"type": "text"}}
    assert chat(server.url, **usual)[0] == 200


def test_a_message_of_several_parts_is_their_texts(server):
    parts = [{"type": "text", "text": text} for text in ("ok", "?")]
    _, whole = chat(server.url)
    _, in_parts = chat(server.url, [{"role": "user", "content": parts}])
    assert whole["prompt_token_ids"] == in_parts["prompt_token_ids"]


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "named"),
    [
        ("/v1/completions", b"{", {}, 400, "JSON"),
        ("/v1/completions", b"[" * 10**5, {}, 400, "JSON"),
        ("/v1/completions", b"[]", {}, 400, "object"),
        ("/v1/completions", b"{}", {"Content-Length": str(MAX_BODY_BYTES + 1)}, 413, str(MAX_BODY_BYTES)),
        ("/v1/completions", b"{}", {"Host": "attacker.example:80"}, 403, "loopback"),
        ("/v1/embeddings", b"{}", {}, 404, "/v1/embeddings"),
        ("/session/s/v1/completions", b'{"prompt": "ok"}', {}, 404, "/session/s/v1/completions"),
        ("/session/t/v1/chat/completions", json.dumps({"messages": QUESTION}).encode(), {}, 404, "no session 't'"),
    ],
)
def test_what_is_no_request_of_ours_has_its_status_and_the_server_goes_on(server, path, body, headers, status, named):
    server.open_session("s")
    request = urllib.request.Request(f"{server.root}{path}", body, headers)
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request, timeout=300)
    with refusal.value as error:
        assert (error.code, named in json.load(error)["error"]["message"]) == (status, True)
    assert complete(server.url)[0] == 200


def test_a_session_has_one_completion_a_turn_and_one_request_at_a_time(server):
    url, session = server.open_session("s"), server._sessions["s"]
    status, reply = chat(url, n=2)
    assert (status, reply["error"]["message"].startswith("n:")) == (400, True)
    with session.lock:
        status, reply = chat(url)
    assert (status, reply["error"]["code"]) == (409, "conflict")
    assert chat(url)[0] == 200
    assert "two requests at a time" in server.close_session("s").episode().failure


def events(url, **body):
    """The pieces of a streamed reply."""
    request = urllib.request.Request(url, json.dumps({"stream": True, **body}).encode())
    with urllib.request.urlopen(request, timeout=300) as reply:
        assert reply.headers["Content-Type"] == "text/event-stream"
        lines = [line.removeprefix("data: ") for line in reply.read().decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_client_that_asks_for_a_stream_gets_all_of_it_at_once(server):
    _, whole = chat(server.url, seed=5)
    [piece] = events(f"{server.url}/chat/completions", messages=QUESTION, seed=5)
    assert piece["object"] == "chat.completion.chunk"
    assert piece["choices"][0]["delta"] == whole["choices"][0]["message"]
    assert piece["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert "usage" not in piece
    [piece] = events(f"{server.url}/completions", prompt="ok", seed=5)
    assert piece["choices"][0]["text"] == complete(server.url, seed=5)[1]["choices"][0]["text"]


@pytest.mark.parametrize(
    ("path", "asked"), [("chat/completions", {"messages": QUESTION}), ("completions", {"prompt": "ok"})]
)
def test_a_stream_says_what_it_took_in_a_piece_without_choices_only_where_that_was_asked_for(server, path, asked):
    _, whole = post(f"{server.url}/{path}", **asked)
    piece, last = events(f"{server.url}/{path}", **asked, stream_options={"include_usage": True})
    assert (piece["usage"], last["choices"], last["usage"]) == (None, [], whole["usage"])
    for options in ({}, {"include_usage": False}, {"include_obfuscation": False}, None):
        [piece] = events(f"{server.url}/{path}", **asked, stream_options=options)
        assert len(piece["choices"]) == 1


def test_a_request_brings_the_sampling_settings_that_a_recipe_has(server):
    asked, sample = [], server._engine.sample
    server._engine.sample = lambda *given, seed: (asked.append(given[2]), sample(*given, seed=seed))[1]
    alike = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
    alike |= {"presence_penalty": 0.2, "frequency_penalty": -0.3, "ignore_eos": True}
    body = alike | {"logit_bias": {"7": -100, "5": 1.5}, "min_tokens": 2, "max_tokens": 9}
    wanted = SamplingOptions(
        **alike,
        max_new_tokens=9,
        logit_bias=((7, -100.0), (5, 1.5)),
        min_new_tokens=2,
        stop=("the",),
        stop_token_ids=(6,),
    )
    for ask in (complete, chat):
        assert ask(server.url, **body, stop="the", stop_token_ids=[6])[0] == 200
        assert asked.pop() == wanted
    assert complete(server.url, top_k=-1, logit_bias={}, max_tokens=10**6)[0] == 200
    assert asked.pop() == OPTIONS


def test_settings_that_are_the_recipes_are_taken_where_no_others_are(tokenizer):
    with serving(tokenizer, own_settings=False) as server:
        same = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "temperature": 1}
        assert complete(server.url, **same)[0] == 200
        status, reply = complete(server.url, presence_penalty=0.5)
        assert (status, "presence_penalty: sampling is settled" in reply["error"]["message"]) == (400, True)


QUIET = {"enable_thinking": False}
THOUGHT = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("own_settings", [True, False])
def test_a_chat_is_rendered_with_the_variables_of_the_recipe_and_a_request_that_stands_alone_may_bring_others(
    tokenizer, own_settings
):
    with serving(tokenizer, own_settings=own_settings, chat_template_kwargs=QUIET) as server:
        for more in ({}, {"chat_template_kwargs": QUIET}):
            _, reply = chat(server.url, **more)
            assert tokenizer.decode(reply["prompt_token_ids"]).endswith(THOUGHT)
        status, reply = chat(server.url, chat_template_kwargs={"quiet": True})
        assert (status, "given quiet" in reply["error"]["message"]) == (400, True)
        status, reply = chat(server.url, chat_template_kwargs={"enable_thinking": True})
        assert status == (200 if own_settings else 400)
        if own_settings:
            assert not tokenizer.decode(reply["prompt_token_ids"]).endswith(THOUGHT)
        else:
            assert "settled by the recipe" in reply["error"]["message"]


def test_a_harness_reads_what_the_recipes_variables_make_of_the_chat_template_in_every_turn(tokenizer):
    prompts, [[episode]] = had(tokenizer, asking_twice, questions=["ok?"], num_samples=1, chat_template_kwargs=QUIET)
    assert tokenizer.decode(prompts[0].token_ids).endswith(THOUGHT)
    assert tokenizer.decode(episode.completion.token_ids[~episode.completion.trained]).endswith(THOUGHT)


def test_other_variables_of_the_chat_template_are_refused_in_every_turn_of_a_session(server):
    base = server.open_session("s")
    longer = [*QUESTION, chat(base)[1]["choices"][0]["message"], *QUESTION]
    status, reply = chat(base, longer, chat_template_kwargs=QUIET)
    assert (status, "chat_template_kwargs: settled by the recipe" in reply["error"]["message"]) == (400, True)
    assert chat(base, longer)[0] == 200


def test_one_call_at_most_and_none_where_the_request_says_so(server):
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    server._engine.said = lambda prompt: Completion(prompt.id, (5,), call * 2, "stop")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for more, number in (({}, 2), ({"parallel_tool_calls": False}, 1), ({"tool_choice": "none"}, 0)):
        _, reply = chat(server.url, tools=tools, **more)
        assert len(reply["choices"][0]["message"].get("tool_calls", ())) == number


def test_an_engine_that_fails_is_a_500_with_its_words_and_the_server_goes_on(server):
    said, server._engine.said = server._engine.said, lambda prompt: 1 / 0
    status, reply = complete(server.url)
    assert (status, "ZeroDivisionError" in reply["error"]["message"]) == (500, True)
    server._engine.said = said
    assert complete(server.url)[0] == 200


def test_a_request_that_outgrows_the_model_is_refused_alone_and_those_beside_it_are_answered(tokenizer):
    come = threading.Semaphore(0)
    prompts = [[5] * length for length in (1, 2, 5, 3, 9, 4)]

    class Short(Letters):
        def sample(self, prompts, num_samples, options, *, seed):
            for _ in range(0 if self.calls else 7):  # until all others wait behind the first one
                assert come.acquire(timeout=300)
            groups = super().sample(prompts, num_samples, options, seed=seed)
            check_prompts(prompts, num_samples, options, limit=OPTIONS.max_new_tokens + 4)
            return groups

    with serving(tokenizer, Short, gather_seconds=1e-9) as server, ThreadPoolExecutor(7) as threads:
        put = server._waiting.put
        server._waiting.put = lambda asked: (put(asked), come.release())
        first = threads.submit(complete, server.url, [5])
        asked = [threads.submit(complete, server.url, prompt) for prompt in prompts]
        replies = [each.result() for each in asked]
        assert first.result()[0] == 200
    assert max(map(len, server._engine.calls)) > 2
    assert [status for status, _ in replies] == [200, 200, 400, 200, 400, 200]
    for (status, reply), prompt in zip(replies, prompts, strict=True):
        said = reply["choices"][0]["text"] if status == 200 else reply["error"]["message"]
        assert (f"the 22 {len(prompt)}" if status == 200 else "within the model's 44 positions") in said


def test_a_session_whose_engine_fails_once_goes_on_when_the_same_is_asked_again(server, tokenizer):
    url = server.open_session("s")
    said, failing = server._engine.said, lambda prompt: 1 / 0
    more = QUESTION
    for _ in range(3):
        server._engine.said = failing
        assert chat(url, more)[0] == 500
        server._engine.said = said
        _, reply = chat(url, more)
        more = [*more, reply["choices"][0]["message"], {"role": "user", "content": "ok"}]
    episode = server.close_session("s").episode(1.0)
    untroubled = server.open_session("t")
    for length in (1, 3, 5):
        chat(untroubled, more[:length])
    other = server.close_session("t").episode(1.0)
    assert episode.failure == ""
    assert replace(episode, completion=replace(episode.completion, prompt_id="t")) == other


def test_a_request_on_a_connection_that_outlives_the_server_is_refused_and_not_kept_waiting(tokenizer):
    with (
        serving(tokenizer) as server,
        closing(http.client.HTTPConnection(server.root.removeprefix("http://"), timeout=300)) as connection,
    ):
        for end in (server.close, lambda: None):
            try:
                connection.request("POST", "/v1/completions", json.dumps({"prompt": "ok"}))
                with connection.getresponse() as reply:
                    assert reply.status == 200
            except ConnectionError:  # reset, or closed without an answer
                break
            end()
        else:
            raise AssertionError("a closed server answered")


def test_a_server_that_closes_answers_what_it_has_begun_and_refuses_what_comes_then(tokenizer):
    asked, may_go_on = threading.Event(), threading.Event()

    class Slow(Letters):
        def said(self, prompt):
            asked.set()
            assert may_go_on.wait(300)
            return super().said(prompt)

    with serving(tokenizer, Slow) as server, ThreadPoolExecutor(2) as threads:
        begun = threads.submit(complete, server.url)
        assert asked.wait(300)
        closed = threads.submit(server.close)
        while not server._closed:
            time.sleep(0.01)
        status, reply = complete(server.url)
        assert (status, "the server is closed" in reply["error"]["message"]) == (503, True)
        may_go_on.set()
        assert begun.result()[0] == 200
        closed.result()


def test_a_client_that_sends_half_a_request_keeps_no_server_from_closing(tokenizer):
    with serving(tokenizer) as server:
        host, port = server.root.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=300) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost:1\r\n")
            server.close()
            with suppress(ConnectionResetError):
                assert half.recv(1) == b""


def test_what_is_served_can_be_asked(server):
    server.load(WEIGHTS, 4)
    with urllib.request.urlopen(f"{server.url}/models", timeout=300) as reply:
        assert json.load(reply)["data"] == [{"id": "policy", "object": "model", "weights_version": 4}]
    with pytest.raises(InputError, match="new session"):
        server.open_session("a") and server.open_session("a")


# --- harnesses


def asking_twice(base_url, row, seed):
    """A user's harness: its own system message, a second question, and a reward."""
    messages = [{"role": "system", "content": f"Row {row['id']}."}, {"role": "user", "content": row["question"]}]
    _, first = chat(base_url, messages)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "the ok."}]
    status, _ = chat(base_url, messages)
    return float(row["question"] == "ok?") if status == 200 else None


def had(tokenizer, drive, *, engine=None, questions=("ok?", "22"), num_samples=2, limits=None, concurrency=3, **more):
    """The prompts and episodes of one call of ``HarnessEpisodes.episodes``."""
    prompts = [Prompt(str(i), q, (5, 6), columns={"question": q}) for i, q in enumerate(questions)]
    settings = {"num_samples": num_samples, "options": OPTIONS, "seed": 0, "limits": limits or Limits()}
    harness = Harness(command=("unused",), concurrency=concurrency)
    episodes = HarnessEpisodes(harness, drive, tokenizer, **more)
    return episodes.episodes(engine or Letters(tokenizer), prompts, **settings)


def test_a_harness_drives_and_the_trainer_sees_prompt_and_tokens_as_they_were(tokenizer):
    prompts, groups = had(tokenizer, asking_twice)
    for prompt, group in zip(prompts, groups, strict=True):
        assert tokenizer.decode(prompt.token_ids).replace(" ", "").startswith(f"<|im_start|>system\nRow{prompt.id}.")
        for episode in group:
            assert episode.num_turns == 2
            assert episode.completion.prompt_id == prompt.id
            assert episode.completion.logp_sampler[:2].tolist() == [-0.5, -1.5]
    assert [[sum(e.turn_rewards) for e in group] for group in groups] == [[1.0, 1.0], [0.0, 0.0]]


def test_what_only_one_episode_of_a_group_began_with_is_read_and_not_trained_on(tokenizer):
    def drive(base_url, row, seed):
        text = "ok. " + ("the" if seed % 2 else "22")
        chat(base_url, [{"role": "user", "content": text}])
        return 1.0

    prompts, groups = had(tokenizer, drive)
    for prompt, completion in ((p, e.completion) for p, group in zip(prompts, groups, strict=True) for e in group):
        whole = tokenizer.decode((*prompt.token_ids, *completion.token_ids)).replace(" ", "")
        assert whole.startswith("<|im_start|>user\nok.")
        own = [t for i, t in enumerate(completion.token_ids) if completion.trained is None or completion.trained[i]]
        assert tokenizer.decode(own).replace(" ", "").startswith("the22")


def test_a_harness_that_fails_or_never_asks_ends_its_episode_without_a_reward(tokenizer):
    def fails(base_url, row, seed):
        chat(base_url)
        raise RuntimeError("lost")

    _, groups = had(tokenizer, fails)
    assert all("RuntimeError: lost" in e.failure for group in groups for e in group)
    _, groups = had(tokenizer, lambda base_url, row, seed: 1.0)
    assert all("never asked" in e.failure and e.completion.length == 0 for group in groups for e in group)


@pytest.mark.parametrize(
    ("pays", "failure"),
    [
        (math.inf, "a finite number expected as reward, inf given"),
        (math.nan, "a finite number expected as reward, nan given"),
        ("much", "a finite number expected as reward, 'much' given"),
    ],
)
def test_a_harness_that_pays_what_is_no_finite_number_fails_that_episode_alone(tokenizer, pays, failure):
    def drive(base_url, row, seed):
        chat(base_url)
        return pays if row["id"] == "0" else 1.0

    _, groups = had(tokenizer, drive)
    assert [[e.failure for e in group] for group in groups] == [[failure] * 2, [""] * 2]
    assert [[e.turn_rewards for e in group] for group in groups] == [[()] * 2, [(1.0,)] * 2]


def test_a_harness_that_pays_no_finite_number_fails_at_its_limit_too(tokenizer):
    def drive(base_url, row, seed):
        asking_twice(base_url, row, seed)
        return math.inf

    _, groups = had(tokenizer, drive, limits=Limits(max_turns=1))
    assert all("inf given" in e.failure and not e.turn_rewards for group in groups for e in group)


def test_the_traceback_of_a_harness_begins_in_its_function(tokenizer):
    def drive(base_url, row, seed):
        return row["absent"]

    harness = Harness(function="unused:unused")
    settings = {"num_samples": 1, "options": OPTIONS, "seed": 0, "limits": Limits()}
    _, [[episode]] = HarnessEpisodes(harness, drive, tokenizer).episodes(
        Letters(tokenizer), [Prompt("0", "ok?", (5, 6))], **settings
    )
    assert episode.failure.startswith("KeyError: 'absent'\nTraceback")
    assert re.findall(r'File "(.*?)"', episode.failure) == [__file__]


def test_an_engine_that_fails_stops_the_round_also_where_the_harness_calls_it_a_wrong_answer(tokenizer):
    class Gone(Letters):
        def sample(self, prompts, num_samples, options, *, seed):
            self.calls.append(prompts)
            raise EngineError(needed="a server", given="none", remedy="Start it.")

    def drive(base_url, row, seed):
        return float(chat(base_url)[0] == 200)

    engine = Gone(tokenizer)
    with pytest.raises(EngineError, match="a server; given none"):
        had(tokenizer, drive, engine=engine, concurrency=1)
    assert len(engine.calls) == 1  # it is not waited for again by every other episode


def test_a_harness_that_stumbles_over_its_limit_has_played_to_it(tokenizer):
    def drive(base_url, row, seed):
        reward = asking_twice(base_url, row, seed)
        if reward is None:
            raise RuntimeError("refused")
        return reward

    _, groups = had(tokenizer, drive, limits=Limits(max_turns=1))
    assert all((e.failure, e.completion.finish_reason) == ("", "length") for group in groups for e in group)


def test_all_of_a_group_are_drawn_alike(tokenizer):
    statuses = []

    def drive(base_url, row, seed):
        for temperature in (0.5, 1.0):
            statuses.append(chat(base_url, temperature=temperature)[0])
        return 0.0

    had(tokenizer, drive)
    assert sorted(statuses) == [200] * 4 + [400] * 4


PROGRAM = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
body = json.dumps({"messages": [{"role": "user", "content": row["question"]}]}).encode()
reply = json.load(urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body))
print(reply["choices"][0]["message"]["content"])
print(json.dumps({"reward": 0.25}))
"""


def test_a_command_is_a_harness_too(tokenizer, tmp_path):
    (tmp_path / "solve.py").write_text(PROGRAM)
    made = environment_of(Harness(command=(sys.executable, str(tmp_path / "solve.py"))), tokenizer)
    assert isinstance(made, Driver)
    _, groups = had(tokenizer, made.drive)
    assert [[e.turn_rewards for e in group] for group in groups] == [[(0.25,)] * 2] * 2
    slow = Harness(command=(sys.executable, "-c", "import time; time.sleep(60)"), seconds=0.3)
    with pytest.raises(TimeoutError, match=r"0\.3 s"):
        slow.drive()("http://127.0.0.1:9/v1", {}, 0)
    with pytest.raises(RuntimeError, match="status 3"):
        Harness(command=(sys.executable, "-c", "raise SystemExit(3)")).drive()("http://127.0.0.1:9/v1", {}, 0)


def commanded(tmp_path, program):
    """The reward of a command that runs this program."""
    (tmp_path / "agent.py").write_text(program)
    harness = Harness(command=(sys.executable, str(tmp_path / "agent.py")))
    return harness.drive()("http://127.0.0.1:9/v1", {}, 0)


def test_the_failure_of_a_command_begins_with_the_last_line_that_it_wrote_to_standard_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"^the harness ended with status 1: ValueError: lost\nTraceback"):
        commanded(tmp_path, "raise ValueError('lost')")
    with pytest.raises(RuntimeError, match=r"^the harness ended with status 1: lost$"):
        commanded(tmp_path, "raise SystemExit('lost\\n\\n')")


@pytest.mark.parametrize(
    ("printed", "reward"), [('{"reward": 0.5, "steps": 3}', 0.5), ('{"reward": null}', None), ("0.5", None)]
)
def test_a_command_may_print_a_reward(tmp_path, printed, reward):
    assert commanded(tmp_path, f"print({printed!r})") == reward


def test_a_command_that_prints_an_object_without_a_reward_is_told_of_once(tmp_path, caplog):
    for _ in range(2):
        assert commanded(tmp_path, """print('{"rewrad": 0.5}')""") is None
    [said] = caplog.messages
    assert "an object with the keys rewrad and without reward" in said


def test_a_command_is_ended_though_a_process_that_left_its_group_keeps_its_output_open(tmp_path):
    held = tmp_path / "held"
    os.mkfifo(held)
    end = os.open(held, os.O_RDWR)
    slow = Harness(command=("sh", "-c", f"setsid sh -c 'read line < {held}' & sleep 1000"), seconds=1.0)
    with ThreadPoolExecutor(1) as thread:
        try:
            with pytest.raises(TimeoutError, match="the harness took over 1 s"):
                thread.submit(slow.drive(), "http://127.0.0.1:9/v1", {}, 0).result(200)
        finally:
            os.write(end, b"\n")  # at which that process ends
    os.close(end)


@pytest.mark.parametrize(("output", "seconds"), [("", 0.5), (">/dev/null 2>&1", 300.0)])
def test_what_a_command_leaves_running_is_ended_with_it(tmp_path, output, seconds):
    """Also where it keeps the output open of a command that has ended."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    command = Harness(command=("sh", "-c", f"exec 3>{pipe}; sleep 100 {output} &"), seconds=seconds)
    with nullcontext() if output else pytest.raises(TimeoutError):
        command.drive()("http://127.0.0.1:9/v1", {}, 0)

    def has_a_writer():
        try:
            return os.read(end, 1) != b""
        except BlockingIOError:
            return True

    latest = time.monotonic() + 60
    while has_a_writer() and time.monotonic() < latest:
        time.sleep(0.01)
    assert not has_a_writer()
    os.close(end)


def test_a_round_that_is_given_up_begins_no_episode_and_refuses_those_under_way(tokenizer, monkeypatch):
    second, over, begun, statuses = threading.Event(), threading.Event(), [], []

    class Threads(ThreadPoolExecutor):
        def shutdown(self, *arguments, **options):
            over.set()
            super().shutdown(*arguments, **options)

    def drive(base_url, row, seed):
        begun.append(row["id"])
        if row["id"] == "0":
            assert second.wait(300)
            raise KeyboardInterrupt
        second.set()
        assert over.wait(300)
        statuses.append(chat(base_url)[0])

    monkeypatch.setattr("logitless.rollout.environments.harness.ThreadPoolExecutor", Threads)
    with pytest.raises(KeyboardInterrupt):
        had(tokenizer, drive, questions=["ok?"] * 9, num_samples=1, concurrency=2)
    assert set(statuses) == {500}
    assert set(begun) <= {"0", "1", "2"}


@pytest.mark.parametrize("given", [{}, {"function": "a:b", "command": ("c",)}, {"command": ("c",), "concurrency": 0}])
def test_a_harness_is_one_thing(given):
    with pytest.raises(ConfigurationError, match="function or a command"):
        Harness(**given)
    with pytest.raises(ConfigurationError, match="import path"):
        Harness(function="nowhere:x").drive()
