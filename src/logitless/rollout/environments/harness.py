"""Episodes that somebody else's program drives: it talks to an OpenAI endpoint, and the trainer sees exact tokens.

For each episode the program gets a base url of its own. What it sends there and what comes back is one conversation,
kept as tokens; when the program is done it says a reward, or leaves that to the recipe's rewards. It need not know that
it is being trained with.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from transformers import PreTrainedTokenizerBase

from logitless.errors import ConfigurationError, EngineError, InputError
from logitless.own_code import named
from logitless.rollout.engine import Engine, Weights
from logitless.rollout.environment import Limits, end_to_end, given
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.serving.server import EngineServer
from logitless.rollout.tool_calls import Format
from logitless.seeds import derived_seed
from logitless.types import Completion, Episode, Prompt

Drive: TypeAlias = Callable[[str, Mapping[str, Any], int], float | None]
"""``(base_url, row, seed) -> reward``: one episode, start to end, through any OpenAI client."""


@dataclass(frozen=True, kw_only=True)
class Harness:
    """A program of yours that drives the policy through an OpenAI endpoint on loopback; it has your rights.

    Give `function` or `command`. A command reads one JSON object (`id`, `prompt`, `messages`, `seed` and the row's
    columns) from its standard input, finds `OPENAI_BASE_URL` and `OPENAI_API_KEY` in its environment, and may print
    `{"reward": 0.5}` as its last line. A program that fails, or goes back in its conversation, ends its episode without
    a reward.

    Args:
        function: `package.module:function` or `./file.py:function`, called with base url, row and seed; returns the
            reward or null. `logitless.integrations.verifiers:play_task` plays tasks of verifiers.
        options: what the function is called with besides, by name.
        command: program and arguments.
        concurrency: episodes at a time.
        seconds: for one episode; a command is ended then.
        format: how the policy writes tool calls, for programs that send tools.
        template: plain text around `{reply}`, used instead of the tokenizer's chat template between turns.

    Raises:
        ConfigurationError: neither of the two or both, or a limit that is not positive.

    Example:
        >>> Harness(command=("python", "solve.py")).concurrency
        16
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    name: Literal["harness"] = "harness"
    function: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    concurrency: int = 16
    seconds: float = 300.0
    format: Format = "tool_call"
    template: str | None = None

    def __post_init__(self) -> None:
        one = (self.function is None) != (not self.command) and not (self.command and self.options)
        if not (one and self.concurrency > 0 and self.seconds > 0):
            raise ConfigurationError(
                needed="a function or a command, options with a function alone, and positive limits",
                given=f"function={self.function}, options={dict(self.options)}, command={self.command},"
                f" concurrency={self.concurrency}, seconds={self.seconds}",
                remedy="Name one of the two.",
            )

    def drive(self) -> Drive:
        """What drives an episode.

        Raises:
            ConfigurationError: the function cannot be imported.
        """
        if self.function is None:
            return self._run_command
        found: Drive = named(self.function, what="of a function", key="rollout.environment.function")
        return partial(found, **self.options) if self.options else found

    def _run_command(self, base_url: str, row: Mapping[str, Any], seed: int) -> float | None:
        environment = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "none"}
        process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
            start_new_session=True,
        )
        try:
            given = json.dumps({**row, "seed": seed}, default=str)
            printed, errors = process.communicate(given, timeout=self.seconds)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"the harness took over {self.seconds:g} s") from error
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()  # without reading on: what left the group may hold the other end
        if process.returncode != 0:
            raise RuntimeError(f"the harness ended with status {process.returncode}: {errors[-500:]}")
        last = (printed.strip().splitlines() or [""])[-1]
        try:
            reward = json.loads(last)["reward"]
        except (ValueError, KeyError, TypeError):
            return None
        return None if reward is None else float(reward)


@dataclass(frozen=True)
class HarnessEpisodes:
    """Has episodes by a harness, against a server that lives as long as a round.

    Args:
        drive: one episode.
        tokenizer: of the policy.
        concurrency, format, template: as ``Harness`` has them.
        chat_template_kwargs: further variables of the tokenizer's chat template.
    """

    drive: Drive
    tokenizer: PreTrainedTokenizerBase
    concurrency: int = 16
    format: Format = "tool_call"
    template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def episodes(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        *,
        num_samples: int,
        options: SamplingOptions,
        seed: int,
        limits: Limits,
    ) -> tuple[list[Prompt], list[list[Episode]]]:
        """``num_samples`` episodes of each prompt, and the prompts as the policy read them.

        A harness writes what the policy reads first, be it the row's prompt or not: a group's prompt is what its
        episodes have in common, and the rest of it stands in the completions, where it is not trained on.

        Args:
            engine: samples, while nothing else asks it.
            prompts: with distinct ids.
            num_samples: of each.
            options: of a turn, the same for all.
            seed: of the round.
            limits: of an episode.

        Raises:
            EngineError: the engine's, whatever the harness made of the answer that said so.
        """
        settings: dict[str, Any] = {"limits": limits, "format": self.format, "template": self.template}
        settings["chat_template_kwargs"] = self.chat_template_kwargs
        remembering = _Remembering(engine)
        with (
            EngineServer(remembering, self.tokenizer, options, seed=seed, own_settings=False, **settings) as server,
            ThreadPoolExecutor(max_workers=self.concurrency) as threads,
        ):
            asked = [(prompt, g) for prompt in prompts for g in range(num_samples)]
            try:
                had = list(threads.map(lambda each: self._one(server, *each, seed=seed, limits=limits), asked))
            except BaseException:  # Ctrl-C too: no episode begins any more, and those under way are refused
                remembering.failure = EngineError(
                    needed="a round that goes on", given="one that was given up", remedy="Look for why it was."
                )
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        if remembering.failure is not None:
            raise remembering.failure
        groups = [had[p * num_samples : (p + 1) * num_samples] for p in range(len(prompts))]
        told = [_with_common_prompt(p, group) for p, group in zip(prompts, groups, strict=True)]
        return [prompt for prompt, _ in told], [group for _, group in told]

    def _one(
        self, server: EngineServer, prompt: Prompt, sample: int, *, seed: int, limits: Limits
    ) -> tuple[np.ndarray, Episode]:
        """The tokens that the policy read first, and the episode."""
        session = f"{derived_seed('session', prompt.id, sample):x}"
        most = None if limits.max_tokens is None else len(prompt.token_ids) + limits.max_tokens
        base_url = server.open_session(session, most_tokens=most)
        row = {"id": prompt.id, "prompt": prompt.text, "messages": prompt.messages, **prompt.columns}
        reward, failure = None, ""
        try:
            reward = self.drive(base_url, row, derived_seed(seed, prompt.id, sample))
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        found = server.close_session(session)
        if not found.cut:  # a harness that stumbles over its limit has played to it
            found.failure = found.failure or failure
        episode = found.episode(reward)
        read = np.zeros(0, np.int64) if found.prompt is None else found.prompt.token_ids
        return read, replace(episode, completion=replace(episode.completion, prompt_id=prompt.id))


class _Remembering:
    """An ``Engine`` that, once it has failed, is not asked again: every further call raises what the first one did."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self.failure: EngineError | None = None

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
    ) -> list[list[Completion]]:
        if self.failure is not None:
            raise self.failure
        try:
            return self._inner.sample(prompts, num_samples, options, seed=seed)
        except EngineError as error:
            self.failure = error
            raise

    def load(self, weights: Weights, version: int) -> None:
        self._inner.load(weights, version)

    def close(self) -> None:
        self._inner.close()


def _with_common_prompt(prompt: Prompt, had: Sequence[tuple[np.ndarray, Episode]]) -> tuple[Prompt, list[Episode]]:
    """The prompt that all episodes of a group begin with, and the rest of each one's at the front of its completion."""
    read = [ids for ids, _ in had if len(ids)]
    if not read:
        return prompt, [episode for _, episode in had]
    shortest = min(map(len, read))
    differ = np.any([ids[:shortest] != read[0][:shortest] for ids in read], axis=0)
    common = read[0][: int(differ.argmax()) if differ.any() else shortest]
    if not len(common):
        raise InputError(
            needed="conversations of one prompt that begin with the same token",
            given=f"others for prompt {prompt.id!r}",
            remedy="Let the harness begin every conversation of a row alike.",
        )
    episodes = [
        replace(episode, completion=_with_read(episode.completion, ids[len(common) :])) if len(ids) else episode
        for ids, episode in had
    ]
    return replace(prompt, token_ids=common), episodes


def _with_read(completion: Completion, read: np.ndarray) -> Completion:
    """The completion with tokens before it that were read and not sampled."""
    if not len(read):
        return completion
    first = 0 if completion.turn is None or not completion.length else int(completion.turn[0])
    versions = completion.token_versions
    version = completion.weights_version if versions is None else int(versions[0])
    return end_to_end([given(read, completion, turn=first, version=version), completion])
