"""Episodes driven by another program, which talks to an OpenAI endpoint while the trainer sees exact tokens.

For each episode the program gets its own base url; requests to it are one conversation, kept as tokens. The program
returns a reward, or leaves that to the recipe's rewards. It need not know that it is used for training.
"""

import functools
import json
import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np

from logitless.errors import ConfigurationError, EngineError, InputError
from logitless.own_code import check_takes, named
from logitless.rollout.engine import Engine, Weights
from logitless.rollout.environment import Limits, end_to_end, failure_of, given, wrong_reward
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.tool_calls import Format
from logitless.seeds import derived_seed
from logitless.types import Completion, Episode, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from logitless.rollout.serving.server import EngineServer

Drive: TypeAlias = Callable[[str, Mapping[str, Any], int], float | None]
"""``(base_url, row, seed) -> reward``: runs one episode through any OpenAI client."""

logger = logging.getLogger("logitless")

_MOST_CHARACTERS = 2000
"""Of a failed command's standard error, from its end."""


@dataclass(frozen=True, kw_only=True)
class Harness:
    """A program of yours that drives the policy through an OpenAI endpoint on loopback; it runs with your rights.

    Give `function` or `command`. A command reads one JSON object (`id`, `prompt`, `messages`, `seed` and the row's
    columns) from its standard input, finds `OPENAI_BASE_URL` and `OPENAI_API_KEY` in its environment, and may print
    `{"reward": 0.5}` as its last line. If a program fails, or changes earlier messages, its episode has no reward.

    Args:
        function: `package.module:function` or `./file.py:function`, called with base url, row and seed; returns the
            reward or null. `logitless.integrations.verifiers:play_task` plays tasks of verifiers.
        options: keyword arguments of the function.
        command: program and arguments, started in the current folder.
        concurrency: episodes at a time.
        seconds: until a command is killed.
        format: how the policy writes tool calls, for programs that send tools.
        template: plain text around `{reply}`, used instead of the tokenizer's chat template between turns.

    Raises:
        ConfigurationError: neither or both of function and command, or a limit that is not positive.
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
        """The function that runs an episode.

        Raises:
            ConfigurationError: it cannot be imported, or takes other arguments; or there is no such program.
        """
        if self.function is None:
            if shutil.which(self.command[0]) is None:
                raise ConfigurationError(
                    needed="a program in rollout.environment.command, on PATH or as a path from the current folder",
                    given=f"{self.command[0]!r} in {Path.cwd()}",
                    remedy="Correct its name, write its whole path, or make it executable.",
                )
            return self._run_command
        found: Drive = named(self.function, what="of a function", key="rollout.environment.function")
        check_takes("function(base_url, row, seed, **options)", found, "", {}, 0, **self.options)
        return functools.partial(found, **self.options) if self.options else found

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
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a program that has ended may have left others running
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()  # without reading to the end: a process that left the group may keep it open
        if process.returncode != 0:
            raise RuntimeError(_ended_badly(process.returncode, errors))
        return _reward_in((printed.strip().splitlines() or [""])[-1])


def _ended_badly(status: int, errors: str) -> str:
    """A program's status with its last line of standard error, and below that the lines before it.

    Example:
        >>> _ended_badly(1, "Traceback:\\n  1/0\\nKeyError: 'answer'\\n").splitlines()[0]
        "the harness ended with status 1: KeyError: 'answer'"
    """
    lines = errors[-_MOST_CHARACTERS:].strip().splitlines()
    first = ": ".join([f"the harness ended with status {status}", *lines[-1:]])
    return "\n".join([first, *lines] if len(lines) > 1 else [first])


def _reward_in(last_line: str) -> float | None:
    """The reward that a program printed; None if its last line is no JSON object."""
    try:
        printed = json.loads(last_line)
    except ValueError:
        return None
    if not isinstance(printed, dict):
        return None
    if "reward" not in printed:
        _warn_without_reward(", ".join(printed) or "none")
    reward = printed.get("reward")
    return None if reward is None else float(reward)


@functools.cache  # once, and not for each episode
def _warn_without_reward(keys: str) -> None:
    logger.warning(
        'the last line of a harness was an object with the keys %s and without reward; {"reward": 0.5} would be read',
        keys,
    )


@dataclass(frozen=True)
class HarnessEpisodes:
    """Runs a harness against a server that serves one batch of episodes.

    Args:
        harness: its ``concurrency``, ``format`` and ``template`` are used.
        drive: runs one episode.
        tokenizer: of the policy.
        chat_template_kwargs: further variables of the tokenizer's chat template.
    """

    harness: Harness
    drive: Drive
    tokenizer: "PreTrainedTokenizerBase"
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
        """``num_samples`` episodes of each prompt, and the prompts that the policy read.

        The harness writes the first messages, whether or not they are the row's prompt. The returned prompt is what the
        episodes of its group have in common; the rest is at the front of the completions, where it is not trained on.

        Args:
            engine: samples, for this call alone.
            prompts: with distinct ids.
            num_samples: of each.
            options: of every turn.
            seed: of the batch.
            limits: of an episode.

        Raises:
            EngineError: the engine failed, even if the harness handled the server's error.
            UnavailableError: Starlette or uvicorn is not installed.
        """
        from logitless.rollout.serving.server import EngineServer

        failing = _FailingOnce(engine)
        with (
            EngineServer(
                failing,
                self.tokenizer,
                options,
                seed=seed,
                limits=limits,
                format=self.harness.format,
                template=self.harness.template,
                chat_template_kwargs=self.chat_template_kwargs,
                own_settings=False,
            ) as server,
            ThreadPoolExecutor(max_workers=self.harness.concurrency) as threads,
        ):
            samples = [(prompt, g) for prompt in prompts for g in range(num_samples)]
            try:
                runs = list(threads.map(lambda each: self._run(server, *each, seed=seed, limits=limits), samples))
            except BaseException:  # Ctrl-C too: begin no further episode, and refuse requests of those under way
                failing.failure = EngineError(
                    needed="a batch of episodes under way", given="one that was stopped", remedy="See what stopped it."
                )
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        if failing.failure is not None:
            raise failing.failure
        groups = [runs[p * num_samples : (p + 1) * num_samples] for p in range(len(prompts))]
        pairs = [_with_common_prompt(p, group) for p, group in zip(prompts, groups, strict=True)]
        return [prompt for prompt, _ in pairs], [episodes for _, episodes in pairs]

    def _run(
        self, server: "EngineServer", prompt: Prompt, sample: int, *, seed: int, limits: Limits
    ) -> tuple[np.ndarray, Episode]:
        """The prompt tokens of the first request, and the episode."""
        session = f"{derived_seed('session', prompt.id, sample):x}"
        most = None if limits.max_tokens is None else len(prompt.token_ids) + limits.max_tokens
        base_url = server.open_session(session, most_tokens=most)
        row = {"id": prompt.id, "prompt": prompt.text, "messages": prompt.messages, **prompt.columns}
        reward, failure = None, ""
        try:
            reward = self.drive(base_url, row, derived_seed(seed, prompt.id, sample))
        except Exception as error:
            # a command has its own traceback in the message
            failure = f"{type(error).__name__}: {error}" if self.harness.command else failure_of(error)
        wrong = "" if reward is None else wrong_reward(reward)
        found = server.close_session(session)
        if wrong or not found.cut:  # it may fail because a limit refused its request; the episode is complete then
            found.failure = found.failure or failure or wrong
        episode = found.episode(None if wrong else reward)
        read = np.zeros(0, np.int64) if found.prompt is None else found.prompt.token_ids
        return read, replace(episode, completion=replace(episode.completion, prompt_id=prompt.id))


class _FailingOnce:
    """An ``Engine`` that is not called again once it has failed: further calls raise the first error."""

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


def _with_common_prompt(prompt: Prompt, runs: Sequence[tuple[np.ndarray, Episode]]) -> tuple[Prompt, list[Episode]]:
    """The longest common beginning as the group's prompt; what each episode has beyond it moves to its completion."""
    read = [ids for ids, _ in runs if len(ids)]
    if not read:
        return prompt, [episode for _, episode in runs]
    shortest = min(map(len, read))
    differ = np.any([ids[:shortest] != read[0][:shortest] for ids in read], axis=0)
    common = read[0][: int(differ.argmax()) if differ.any() else shortest]
    if not len(common):
        raise InputError(
            needed="conversations of one prompt that begin with the same token",
            given=f"different ones for prompt {prompt.id!r}",
            remedy="Let the harness begin every conversation of a row alike.",
        )
    episodes = [
        replace(episode, completion=_with_read(episode.completion, ids[len(common) :])) if len(ids) else episode
        for ids, episode in runs
    ]
    return replace(prompt, token_ids=common), episodes


def _with_read(completion: Completion, read: np.ndarray) -> Completion:
    """The completion with prompt tokens in front, which are not trained on."""
    if not len(read):
        return completion
    first = 0 if completion.turn is None or not completion.length else int(completion.turn[0])
    versions = completion.token_versions
    version = completion.weights_version if versions is None else int(versions[0])
    return end_to_end([given(read, completion, turn=first, version=version), completion])
