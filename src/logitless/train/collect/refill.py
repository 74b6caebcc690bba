"""Streaming refills: a zero-signal group is replaced as soon as it is scored, while others are still being sampled.

    rounds      P prompts; wait for the longest; score all; then as many new prompts as zero-signal groups; wait again
    streaming   P slots; a slot whose group is done is scored at once, and takes another prompt if it has no signal

A slot is refilled at most as often as there would be further rounds. Which prompt goes to which slot depends on timing,
and so on the machine. So refills stream only for blocks that are logged (``ahead.py``), and only with an engine that
several threads may ask (``ConcurrentEngine``). A block without refills is the same either way.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from logitless.rewards.reward import judge
from logitless.rollout.environment import Environment, Reply, play, replies_of
from logitless.rollout.sampling import SamplingOptions
from logitless.train.block import JudgedBlock, have_signal
from logitless.train.collect.collector import GroupSampler
from logitless.types import Completion, Episode, Group, Prompt


def refilled_as_they_come(
    sampler: GroupSampler,
    first: Sequence[Prompt],
    another: Callable[[], Prompt],
    num_samples: int,
    options: SamplingOptions,
    *,
    seed_of: Callable[[int], int],
    max_refills: int,
    at_once: int,
) -> JudgedBlock:
    """Sample a block with one thread for each prompt.

    Args:
        sampler: several threads ask its engine and its environment, which is ``OneAtATime``. Rewards score in the
            calling thread.
        seed_of: the seed for the block's n-th refill; 0 stands for its first prompts.
        max_refills: of a slot.
    """
    environment = sampler.environment
    assert isinstance(environment, OneAtATime)
    prompts: list[Prompt] = []
    groups: dict[int, Group] = {}
    refills: list[int] = []
    with ThreadPoolExecutor(min(len(first), at_once), "logitless-episodes") as pool:
        waiting: dict[Future[list[Episode]], int] = {}

        def sample(prompt: Prompt, number: int) -> list[Episode]:
            seed = seed_of(max(0, number + 1 - len(first)))
            how: Any = {"num_samples": num_samples, "options": options, "seed": seed, "limits": sampler.limits}
            [episodes] = play(sampler.engine, [prompt], environment, **how)
            return episodes

        def begin(prompt: Prompt, refill: int) -> None:
            number = len(prompts)
            prompts.append(prompt)
            refills.append(refill)
            waiting[pool.submit(sample, prompt, number)] = number

        try:
            for prompt in first:
                begin(prompt, 0)
            while waiting:
                done = sorted(wait(waiting, return_when=FIRST_COMPLETED).done, key=waiting.__getitem__)
                numbers = [waiting.pop(future) for future in done]
                asked, episodes = [prompts[n] for n in numbers], [future.result() for future in done]
                found = judge(asked, episodes, sampler.rewards, unscored=sampler.unscored)
                for number, group, has_signal in zip(numbers, found, have_signal(found), strict=True):
                    groups[number] = group
                    if not has_signal and refills[number] < max_refills:
                        begin(another(), refills[number] + 1)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    sampled = tuple(groups[number] for number in range(len(prompts)))
    return JudgedBlock(sampled, tuple(have_signal(sampled)), 1 + max(refills, default=0))


class OneAtATime:
    """An ``Environment`` that several threads may call: a lock lets them in one by one."""

    def __init__(self, inner: Environment) -> None:
        self._inner, self._lock = inner, threading.Lock()

    def start(self, prompt: Prompt, *, seed: int) -> Any:
        """The inner environment's."""
        with self._lock:
            return self._inner.start(prompt, seed=seed)

    def reply(self, state: Any, turn: Completion) -> Reply:
        """The inner environment's."""
        return self.replies([state], [turn])[0]

    def replies(self, states: Sequence[Any], turns: Sequence[Completion]) -> list[Reply]:
        """The inner environment's."""
        with self._lock:
            return replies_of(self._inner, states, turns)
