"""A server with the part of vLLM's HTTP interface that logitless uses, around a small model; it fails on demand."""

import json
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from torch import nn

from logitless.models.lora import load_adapters
from logitless.rollout.engine import Weights
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.transformers import TransformersEngine
from logitless.rollout.vllm.weight_folder import read_weights
from logitless.types import Prompt

Answer = tuple[int, bytes] | None
"""(status, content), or None to close the connection without one."""


@dataclass
class Served:
    """The state of a server, and the faults that it shall have.

    Args:
        model: makes a model with the weights that a server starts with.
        tokenizer: of the model.
        context: tokens of prompt and completion.
        key: that requests must carry, or None.
        token_seconds: draw token by token, with a wait before each, and go on with new weights after a pause; None:
            whole completions, as the transformers engine draws them.
        hold: whether a sample that is drawn token by token waits after its third one, by the name of the weights.
    """

    model: Callable[[], nn.Module]
    tokenizer: Any
    context: int = 64
    key: str | None = None
    faults: dict[str, list[Callable[[Any], Answer]]] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    loads: bool = True
    token_seconds: float | None = None
    hold: Callable[[str], bool] = lambda name: False

    def __post_init__(self) -> None:
        self.lock, self.begun, self.over = threading.Lock(), threading.Event(), threading.Event()
        self.restart()

    def restart(self) -> None:
        """Reset the state, as after ``kill -9`` and a new start."""
        policy = self.model()
        with self.lock:  # another request sees all of it or nothing
            self.name, self.adapters, self.paused, self.policy = "default", dict[str, nn.Module](), False, policy

    def next_fault(self, path: str) -> Callable[[Any], Answer] | None:
        """The fault to reply with instead of the right answer; each is used once."""
        try:
            return self.faults[path].pop(0)
        except (KeyError, IndexError):
            return None

    def answer(self, path: str, body: Any) -> Any:
        """The answer in Python; a ``KeyError`` is a 404."""
        match path:
            case "/v1/models":
                base = {"id": "policy", "max_model_len": self.context}
                return {"data": [base, *({"id": name, "max_model_len": None} for name in list(self.adapters))]}
            case "/weight_info":
                return {"weight_version": self.name}
            case "/update_weight_version":
                self.name = body["new_version"]
            case "/pause" | "/resume":
                with self.lock:  # after the token, or the completions, under way
                    self.paused = path == "/pause"
            case "/reset_prefix_cache":
                return {"success": True}
            case "/collective_rpc":
                if self.loads:
                    self._load(Path(next(iter(body["kwargs"].values()))))
                return {"results": [None]}
            case "/v1/load_lora_adapter":
                self.adapters[body["lora_name"]] = load_adapters(self.model(), body["lora_path"])
            case "/v1/unload_lora_adapter":
                del self.adapters[body["lora_name"]]
            case "/tokenize":
                return {"tokens": self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]}
            case "/v1/completions":
                ids = torch.tensor([body["prompt"]])
                with torch.no_grad():
                    logp = self.policy(input_ids=ids).logits[0, :-1].log_softmax(-1)
                named = torch.cat([ids[0, 1:, None], logp.topk(body["prompt_logprobs"], 1).indices], 1)
                pairs = zip(named.tolist(), logp.gather(1, named).tolist(), strict=True)
                known = [{str(i): {"logprob": x} for i, x in zip(*each, strict=True)} for each in pairs]
                return {"choices": [{"prompt_logprobs": [None, *known]}]}
            case "/inference/v1/generate":
                return self._completed(body)
            case _:
                raise KeyError(path)
        return {}

    def _load(self, folder: Path) -> None:
        with self.lock, torch.no_grad():
            parameters = dict(self.policy.named_parameters())
            for name, tensor in read_weights(folder):
                parameters[name].copy_(tensor)

    def _completed(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = body["sampling_params"]
        if self.token_seconds is not None:
            return {"choices": [self._by_token(body["token_ids"], asked, i) for i in range(asked["n"])]}
        options = SamplingOptions(
            max_new_tokens=asked["max_tokens"], temperature=asked["temperature"], stop=tuple(asked["stop"])
        )
        with self.lock:
            model = self.policy if body["model"] == "policy" else self.adapters[body["model"]]
            engine = TransformersEngine(model, self.tokenizer)
            engine.load(Weights.of(model), 0)
            prompt = Prompt("p", "", tuple(body["token_ids"]))
            [group] = engine.sample([prompt], asked["n"], options, seed=asked["seed"])
            name = self.name
        return {
            "choices": [
                choice(i, c.token_ids.tolist(), c.logp_sampler.tolist(), c.finish_reason, [name] * c.length)
                for i, c in enumerate(group)
            ]
        }

    def _by_token(self, prompt: list[int], asked: dict[str, Any], index: int) -> dict[str, Any]:
        """A sample, each of whose tokens is sampled with the weights at that moment."""
        generator = torch.Generator().manual_seed(asked["seed"] + index)
        ids, logps, names, reason = list[int](), list[float](), list[str](), "length"
        while len(ids) < asked["max_tokens"] and reason == "length":
            if self.over.wait(self.token_seconds or 0.0):
                raise ConnectionAbortedError("the server is closed")
            if len(ids) == 3 and self.hold(self.name):
                continue
            with self.lock, torch.no_grad():
                if self.paused:
                    continue
                logits = self.policy(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, -1]
                logp = (logits / (asked["temperature"] or 1e-6)).log_softmax(-1)
                token = int(torch.multinomial(logp.exp(), 1, generator=generator))
                names.append(self.name)
            ids.append(token)
            if len(ids) == 3:
                self.begun.set()
            logps.append(float(logp[token]))
            reason = "stop" if token in asked["stop_token_ids"] else "length"
        return choice(index, ids, logps, reason, names)


def choice(index: int, ids: Any, logps: Any, reason: str, names: list[str]) -> dict[str, Any]:
    """A sample as vLLM's JSON has it."""
    starts = [i for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
    spans = zip(starts, [*starts[1:], len(names)], strict=True)
    return {
        "index": index,
        "token_ids": list(ids),
        "finish_reason": reason,
        "logprobs": {"content": [{"token_id": i, "logprob": x} for i, x in zip(ids, logps, strict=True)]},
        "weight_versions": [{"version": names[start], "start": start, "end": end} for start, end in spans],
    }


@contextmanager
def serving(served: Served):
    """The address of a running server."""

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            path = urlsplit(self.path).path
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else parse_qs(urlsplit(self.path).query)
            served.asked.append((self.path, body))
            if served.key is not None and self.headers.get("Authorization") != f"Bearer {served.key}":
                found: Answer = 401, b'{"error": "Unauthorized"}'
            elif fault := served.next_fault(path):
                found = fault(body)
            else:
                found = answered(served, path, body)
            if found is None:
                self.close_connection = True
                return
            status, content = found
            self.send_response(status)
            if path not in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):  # answered in words
                self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _handle

        def log_message(self, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = False  # closing it waits for all of them: none goes on beside the next test

        def handle_error(self, *args: Any) -> None:  # a client that left
            pass

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        served.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


def answered(served: Served, path: str, body: Any) -> Answer:
    """The reply of a server without a fault."""
    try:
        return 200, json.dumps(served.answer(path, body)).encode()
    except KeyError as error:
        return 404, json.dumps({"error": {"message": f"no {error}"}}).encode()


# --- faults: each takes the body of a request and gives the answer


def failing(status: int, message: str = "something broke") -> Callable[[Any], Answer]:
    """An error."""
    return lambda body: (status, json.dumps({"error": {"message": message}}).encode())


def gone(body: Any) -> Answer:
    """The connection is closed without an answer."""
    return None


def slow(served: Served, seconds: float) -> Callable[[Any], Answer]:
    """Nothing for a while, and then no answer."""

    def wait(body: Any) -> Answer:
        served.over.wait(seconds)
        return None

    return wait


def changed(served: Served, change: Callable[[dict[str, Any]], Any]) -> Callable[[Any], Answer]:
    """The right answer to a request for samples, changed."""

    def answer(body: Any) -> Answer:
        found = served.answer("/inference/v1/generate", body)
        text = change(found)
        return 200, (text if isinstance(text, str) else json.dumps(found)).encode()

    return answer
