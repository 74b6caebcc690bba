"""Refills that stream: a group without a signal is replaced as soon as that is known, while the others are sampled.

    rounds      P prompts, wait for the longest, judge all, then as many new ones as have no signal, wait again, ...
    streaming   P places; whichever is through is judged, and its next prompt begins if it has no signal

A place is refilled as often as there would be rounds. Which prompt comes to which place depends on who is through
first, and so on the machine: only for blocks that are logged (``ahead.py``), and for engines that several threads may
ask (``ConcurrentEngine``). A block that needs no refill is the one that rounds would draw.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from logitless.rewards.reward import Unscored, WeightedReward, judge
from logitless.rollout.environment import Environment, Reply, replies_of
from logitless.train.block import JudgedBlock, signal
from logitless.types import Completion, Episode, Group, Prompt

Draw = Callable[[Prompt, Environment, int], list[Episode]]
"""(prompt, environment, number among the block's refills, 0 for its first prompts) -> its episodes."""


def refilled_as_they_come(
    first: Sequence[Prompt],
    another: Callable[[], Prompt],
    draw: Draw,
    environment: Environment,
    rewards: Sequence[WeightedReward],
    *,
    unscored: Unscored,
    max_refills: int,
    at_once: int,
) -> JudgedBlock:
    """A block, all of whose prompts are under way at the same time.

    Args:
        first: P prompts, one a place.
        another: the next prompt.
        draw: the episodes of one prompt; called by several threads at once.
        environment: answers; it is asked by one thread at a time.
        rewards: judge, in the thread that called.
        unscored: as of ``judge``.
        max_refills: of a place.
        at_once: prompts under way.
    """
    shared = OneAtATime(environment)
    prompts: list[Prompt] = []
    groups: dict[int, Group] = {}
    refills: list[int] = []
    with ThreadPoolExecutor(min(len(first), at_once), "logitless-episodes") as pool:
        waiting: dict[Future[list[Episode]], int] = {}

        def begin(prompt: Prompt, refill: int) -> None:
            number = len(prompts)
            prompts.append(prompt)
            refills.append(refill)
            waiting[pool.submit(draw, prompt, shared, max(0, number + 1 - len(first)))] = number

        try:
            for prompt in first:
                begin(prompt, 0)
            while waiting:
                through = sorted(wait(waiting, return_when=FIRST_COMPLETED).done, key=waiting.__getitem__)
                numbers = [waiting.pop(future) for future in through]
                found = judge([prompts[n] for n in numbers], [f.result() for f in through], rewards, unscored=unscored)
                for number, group, has_signal in zip(numbers, found, signal(found), strict=True):
                    groups[number] = group
                    if not has_signal and refills[number] < max_refills:
                        begin(another(), refills[number] + 1)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    drawn = tuple(groups[number] for number in range(len(prompts)))
    return JudgedBlock(drawn, tuple(signal(drawn)), 1 + max(refills, default=0))


class OneAtATime:
    """An ``Environment`` that several threads may ask, each waiting for the one before it.

    Args:
        inner: asked by one thread at a time.
    """

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
