"""Requests to vLLM's HTTP server, with its replies checked: samples by token ids, log-probs, weights, versions.

Written for vLLM 0.32 with ``VLLM_SERVER_DEV_MODE=1``; docs/servers.md lists the flags.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Int64

from logitless.errors import EngineError, InputError
from logitless.http_client import HttpClient, PassingFault, Refusal, UnusableAnswer
from logitless.rollout.sampling import SamplingOptions
from logitless.types import FinishReason

FRESH = "default"
"""vLLM's name for the weights that a server was started with."""


@dataclass(frozen=True, eq=False)
class Sampled:
    """One sample from vLLM.

    Args:
        token_ids: [L] the stop token included.
        logp: [L] nats, in the distribution that the token was sampled from.
        finish_reason: of vLLM.
        weights: name of the weights that sampled each token.
        versions: of these weights; None until ``WeightSync.versions`` has found them.
    """

    token_ids: Int64[np.ndarray, "L"]
    logp: Float32[np.ndarray, "L"]
    finish_reason: FinishReason
    weights: tuple[str, ...] = ()
    versions: tuple[int, ...] | None = None


class VllmServer:
    """One server.

    Args:
        client: to its address.
    """

    def __init__(self, client: HttpClient) -> None:
        self.client, self.url = client, client.url

    # --- samples

    def context(self, model: str | None) -> int:
        """The most tokens of prompt and completion together.

        Args:
            model: None for any.

        Raises:
            EngineError: it does not serve the model.
        """
        served = self.models()
        if model is not None and model not in served:
            raise EngineError(
                needed=f"a server of the model {model!r} at {self.url}",
                given=f"one of {', '.join(map(repr, served)) or 'none'}",
                remedy="Set rollout.engine.model, or start the server with --served-model-name.",
            )
        named = () if model is None else (served[model],)
        limits = [limit for limit in (*named, *served.values()) if limit is not None]  # an adapter has none
        if not limits:
            raise UnusableAnswer(f"models without max_model_len: {served!r:.200}")
        return limits[0]

    def models(self) -> dict[str, int | None]:
        """The names of the models that it serves, adapters included, with the context of each, if known."""
        answer = self.client.get("/v1/models")
        try:
            return {each["id"]: each.get("max_model_len") for each in answer["data"]}
        except (TypeError, KeyError, AttributeError) as error:
            raise UnusableAnswer(f"a list of models that reads {answer!r:.200}") from error

    def sample(
        self, model: str, prompt: Sequence[int], num_samples: int, settings: Mapping[str, Any], *, seed: int
    ) -> list[Sampled]:
        """Samples of one prompt, in order.

        Args:
            model: of the model or an adapter.
            prompt: token ids.
            num_samples: G.
            settings: from ``request_settings``.
            seed: of the first sample; the server adds 1 for each further one.

        Raises:
            UnusableAnswer: fewer samples, or one without token ids, log-probs, a finish reason or names of weights.
        """
        body = {
            "model": model,
            "token_ids": list(prompt),
            "sampling_params": {"n": num_samples, "seed": seed, **settings},
        }
        return parsed_samples(self.client.post("/inference/v1/generate", body), num_samples, settings["max_tokens"])

    # --- tokens of a prompt

    def tokenize(self, model: str, text: str) -> list[int]:
        """Its token ids of a text, without special tokens of its own.

        Raises:
            UnusableAnswer: no token ids.
        """
        answer = self.client.post("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
        tokens = _of(answer, "tokens")
        if not isinstance(tokens, list):
            raise UnusableAnswer(f"a text without tokens: {answer!r:.200}")
        return tokens

    def prompt_logp(self, model: str, ids: Sequence[int]) -> Float32[np.ndarray, "L"]:
        """[len(ids) - 1] nats: the log-prob of each token but the first, after those ahead of it, at temperature 1.

        Raises:
            UnusableAnswer: a token without a finite log-prob.
        """
        places = self._prompt_logprobs(model, ids, 0)
        return _finite([of[int(token)] for of, token in zip(places, ids[1:], strict=True)])

    def prompt_top(
        self, model: str, ids: Sequence[int], count: int
    ) -> tuple[Int64[np.ndarray, "L K"], Float32[np.ndarray, "L K"]]:
        """The likeliest tokens in the place of each token but the first, and their log-probs at temperature 1.

        Args:
            count: K.

        Raises:
            UnusableAnswer: fewer than K tokens, or numbers that are not log-probs.
        """
        places = self._prompt_logprobs(model, ids, count)  # each has the token of the prompt beside the likeliest
        ordered = [sorted(of.items(), key=lambda pair: -pair[1])[:count] for of in places]
        if any(len(of) < count for of in ordered):
            raise UnusableAnswer(f"{min(map(len, ordered))} log-probs of a token where {count} were asked for")
        logp = _finite([[value for _, value in of] for of in ordered]).reshape(-1, count)
        most = float(np.exp(logp.astype(np.float64)).sum(1).max(initial=0.0))
        if most > 1.001:  # rounding adds no more than 1e-5
            raise UnusableAnswer(f"probabilities that sum to {most:.3g} (its --logprobs-mode must be raw_logprobs)")
        return np.array([[token for token, _ in of] for of in ordered], np.int64).reshape(-1, count), logp

    def _prompt_logprobs(self, model: str, ids: Sequence[int], count: int) -> list[dict[int, float]]:
        """For each token but the first, log-probs by token: of the token itself, and of the ``count`` likeliest."""
        body = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": count}
        answer = self.client.post("/v1/completions", body)
        try:
            of_tokens = answer["choices"][0]["prompt_logprobs"]
            found = [{int(token): entry["logprob"] for token, entry in each.items()} for each in of_tokens[1:]]
            lacking = [token for each, token in zip(found, ids[1:], strict=True) if int(token) not in each]
        except (TypeError, AttributeError, KeyError, IndexError, ValueError) as error:
            raise UnusableAnswer(f"no log-probs of {len(ids)} tokens: {answer!r:.200}") from error
        if lacking:
            raise UnusableAnswer(f"no log-probs of {len(ids)} tokens: {answer!r:.200}")
        return found

    # --- weights

    def weights_name(self) -> str:
        """The name of the server's weights; ``FRESH`` after a start."""
        answer = self.client.get("/weight_info")
        name = answer.get("weight_version") if isinstance(answer, dict) else None
        if not isinstance(name, str):
            raise UnusableAnswer(f"weights without a version: {answer!r:.200}")
        return name

    def call_workers(self, method: str, arguments: Mapping[str, Any], *, seconds: float) -> None:
        """Call a method on every worker."""
        self.client.post("/collective_rpc", {"method": method, "kwargs": dict(arguments)}, seconds=seconds)

    def pause(self, mode: Literal["wait", "keep"]) -> None:
        """Start no new requests.

        Args:
            mode: ``wait``: finish those under way; ``keep``: hold them, without their keys and values, so that they
                continue with the new weights after ``resume``.
        """
        self.client.post(f"/pause?mode={mode}")

    def resume(self) -> None:
        """Continue after ``pause``."""
        self.client.post("/resume")

    def forget_prefixes(self) -> None:
        """Reset the prefix cache, which has keys and values of earlier weights.

        Raises:
            PassingFault: the server did not.
        """
        answer = self.client.post("/reset_prefix_cache")
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise PassingFault(f"a prefix cache that was not reset: {answer!r:.200}")

    def name_weights(self, name: str) -> None:
        """Set the name of the server's weights."""
        self.client.post("/update_weight_version", {"new_version": name})

    def load_adapter(self, name: str, folder: str) -> None:
        """Serve an adapter under a name of its own; nothing if it is served already."""
        try:
            self.client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        except Refusal as refusal:
            if "already been loaded" not in str(refusal):
                raise

    def unload_adapter(self, name: str) -> None:
        """Stop serving an adapter; nothing if it is not served."""
        try:
            self.client.post("/v1/unload_lora_adapter", {"lora_name": name})
        except Refusal as refusal:
            if refusal.status != 404:
                raise


def request_settings(options: SamplingOptions, ends: Sequence[int]) -> dict[str, Any]:
    """vLLM's sampling parameters; all of them, because servers have defaults of their own.

    Args:
        options: of the recipe.
        ends: token ids that end a completion.

    Raises:
        InputError: a bias, or ``min_p`` beside ``top_p`` or ``top_k``: vLLM applies them in another order.
    """
    if options.min_p > 0 and (options.top_p < 1 or options.top_k is not None):
        raise InputError(
            needed="min_p alone under vLLM, which applies it before top_k and top_p and not after them",
            given=f"min_p {options.min_p} beside top_p {options.top_p} and top_k {options.top_k}",
            remedy="Leave min_p or the other two out, or sample with rollout.engine: {name: transformers}.",
        )
    if options.logit_bias:
        raise InputError(
            needed="no logit_bias under vLLM, which adds it before a repetition penalty and not after it",
            given=f"{len(options.logit_bias)} tokens",
            remedy="Leave it out, or sample with rollout.engine: {name: transformers}.",
        )
    return {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": -1 if options.top_k is None else options.top_k,
        "min_p": options.min_p,
        "repetition_penalty": options.repetition_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "min_tokens": options.min_new_tokens,
        "ignore_eos": options.ignore_eos,
        "max_tokens": options.max_new_tokens,
        "stop": list(options.stop),
        "stop_token_ids": list(ends),
        "logprobs": 0,
    }


def parsed_samples(answer: Any, num_samples: int, most: int) -> list[Sampled]:
    """The samples in a reply, in the order of their index.

    Args:
        answer: parsed JSON.
        num_samples: of the request.
        most: tokens of each.

    Raises:
        UnusableAnswer: something is missing or wrong.

    Example:
        >>> one = {"index": 0, "token_ids": [4, 2], "finish_reason": "stop"}
        >>> one["logprobs"] = {"content": [{"token_id": 4, "logprob": -0.5}, {"token_id": 2, "logprob": 0.0}]}
        >>> one["weight_versions"] = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 2}]
        >>> parsed_samples({"choices": [one]}, 1, 8)[0].weights
        ('a', 'b')
    """
    try:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        indices = [choice["index"] for choice in choices]
    except (TypeError, KeyError) as error:
        raise UnusableAnswer(f"no samples: {answer!r:.200}") from error
    if indices != list(range(num_samples)):
        raise UnusableAnswer(f"{len(indices)} samples where {num_samples} were asked for")
    return [_parsed(choice, most) for choice in choices]


def _parsed(choice: Mapping[str, Any], most: int) -> Sampled:
    index, ids = choice["index"], choice.get("token_ids")
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise UnusableAnswer(f"sample {index} without token ids: {ids!r:.100}")
    if len(ids) > most:
        raise UnusableAnswer(f"sample {index} of {len(ids)} tokens where {most} were allowed")
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list) or [_of(each, "token_id") for each in content] != ids:
        raise UnusableAnswer(f"sample {index} of {len(ids)} tokens with log-probs {content!r:.100}")
    logp = [_of(each, "logprob") for each in content]
    wrong = next((each for each in logp if not isinstance(each, int | float) or not math.isfinite(each)), 0.0)
    if wrong != 0.0:
        raise UnusableAnswer(f"sample {index} with the log-prob {wrong!r}")
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise UnusableAnswer(f"sample {index} that ended because of {reason!r}")
    spans = choice.get("weight_versions") or ()
    weights = [_of(span, "version") for span in spans for _ in range(_of(span, "start") or 0, _of(span, "end") or 0)]
    if len(weights) != len(ids) or not all(isinstance(name, str) for name in weights):
        raise UnusableAnswer(f"sample {index} of {len(ids)} tokens with the weights' names {spans!r:.100}")
    return Sampled(np.array(ids, np.int64), np.array(logp, np.float32), reason, tuple(weights))


def _finite(logp: Any) -> Float32[np.ndarray, "..."]:
    """Numbers of a reply as an array.

    Raises:
        UnusableAnswer: one is not finite.
    """
    found = np.array(logp, np.float32)
    if not np.isfinite(found).all():
        raise UnusableAnswer(f"log-probs that are not finite: {logp!r:.200}")
    return found


def _of(entry: Any, name: str) -> Any:
    """A field of a JSON object; None if it is no object or lacks the field."""
    return entry.get(name) if isinstance(entry, dict) else None
