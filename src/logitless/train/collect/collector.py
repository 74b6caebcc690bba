"""The collector: the next block of judged episodes, from whatever engine and environment it was given.

With several ranks each takes its share of the prompts, and all of them get all groups. A completion is drawn from the
seed, the prompt's id and its place among the prompt's samples, and a verdict is of one completion, so that who draws
and who judges makes no difference. What does differ is rounding: the logits of a row depend in their last bits on
which rows are in the batch. Where a number that decides a token lies within that of a boundary, the token is another
one; of tokens drawn from float32 logits that is less than one in a million.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from logitless.data.mixing import MixedOrder
from logitless.data.prompts import PromptOrder
from logitless.distributed.failing import failing_together
from logitless.distributed.ranks import Ranks
from logitless.distributed.shares import in_order
from logitless.errors import EngineError
from logitless.rewards.reward import Unscored, WeightedReward, judge
from logitless.rollout.engine import Engine
from logitless.rollout.environment import Driver, Environment, Limits, play
from logitless.rollout.sampling import SamplingOptions
from logitless.seeds import derived_seed
from logitless.train.block import JudgedBlock, signal
from logitless.train.collect.group_json import put_together, taken_apart
from logitless.train.collect.one_client import OneClientANode
from logitless.train.recipe.rollout import RolloutSection
from logitless.types import Group, Prompt


class Collector:
    """Draws prompts in order, has them played and judged, and refills where groups have no signal.

    Args:
        prompts: to train on.
        engine: samples.
        environment: answers.
        rewards: judge.
        options: of the recipe.
        seed: of the run.
        ranks: that share the prompts of a round; every rank gets the same block.
        order: in which prompts are drawn; None for one source's, from the seed.
    """

    _newest: int | None = None

    def __init__(
        self,
        prompts: Sequence[Prompt],
        engine: Engine,
        environment: Environment | Driver,
        rewards: Sequence[WeightedReward],
        options: RolloutSection,
        *,
        seed: int,
        ranks: Ranks = Ranks.alone(),
        order: PromptOrder | MixedOrder | None = None,
    ) -> None:
        self.ranks = ranks
        self.prompts, self.engine, self.environment = prompts, engine, environment
        self.rewards, self.options, self.seed = rewards, options, seed
        self.order = order or PromptOrder(len(prompts), derived_seed(seed, "order"))

    def under(self, options: RolloutSection) -> "Collector":
        """A collector of the same prompts, with the same place in them, that reads other settings.

        Args:
            options: for the engine that there is.
        """
        other = copy(self)
        other.options = options
        return other

    def expect(self, version: int) -> None:
        """Completions may be of weights of this version from now on, which the engine is given next.

        Until the first call no version is checked.
        """
        self._newest = version

    def next(self, block: int, *, length_factor: float = 1.0) -> JudgedBlock:
        """Sample and judge until there are enough groups to train on or the refills are used up.

        Args:
            block: number, from 0; with the run's seed it settles everything that is random.
            length_factor: multiplies ``max_new_tokens``.
        """
        options, sampling = self.options, self.sampling(length_factor)
        drawn, kept, rounds = list[Group](), list[bool](), 0
        limit = 1 + (options.max_refills if options.zero_signal == "refill" else 0)
        while rounds < limit and sum(kept) < options.prompts_per_block:
            prompts = [self.prompts[i] for i in self.order.next(options.prompts_per_block - sum(kept))]
            groups = sampled_and_judged(
                self.ranks,
                self.engine,
                self.environment,
                prompts,
                self.rewards,
                num_samples=options.completions_per_prompt,
                options=sampling,
                unscored=options.unscored,
                seed=derived_seed(self.seed, "rollout", block, rounds),
                limits=options.limits,
            )
            drawn += groups
            kept += [True] * len(groups) if options.zero_signal == "keep" else signal(groups)
            rounds += 1
        return self.checked(JudgedBlock(tuple(drawn), tuple(kept), rounds))

    def checked(self, block: JudgedBlock) -> JudgedBlock:
        """The block, if weights that the engine was given sampled it; recorded completions may be of other weights.

        Raises:
            EngineError: a completion has no version, or a newer one.
        """
        if self._newest is None or self.options.engine.recorded_file is not None:
            return block
        for completion in (each for group in block.drawn for each in group.completions if each.length):
            versions, last = completion.token_versions, completion.weights_version
            last = last if versions is None else int(versions.max())
            if last is None or last > self._newest:
                raise EngineError(
                    needed=f"the weights_version that rollout.engine was given with `load`, at most {self._newest}",
                    given=f"{last} of a completion of prompt {completion.prompt_id!r}",
                    remedy="Keep the version with the weights in `load`, and put it into each Completion in `sample`.",
                )
        return block

    def sampling(self, length_factor: float) -> SamplingOptions:
        """How a block is sampled whose limit is multiplied."""
        options = self.options.sampling
        if length_factor == 1:
            return options
        return replace(options, max_new_tokens=max(1, int(options.max_new_tokens * length_factor)))

    def close(self) -> None:
        """Nothing is under way between two blocks."""

    def state_dict(self) -> dict[str, Any]:
        """Where in the prompts it is, as JSON."""
        return self.order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``."""
        self.order.load_state_dict(state)


def sampled_and_judged(
    ranks: Ranks,
    engine: Engine,
    environment: Environment | Driver,
    prompts: Sequence[Prompt],
    rewards: Sequence[WeightedReward],
    *,
    num_samples: int,
    options: SamplingOptions,
    unscored: Unscored,
    seed: int,
    limits: Limits = Limits(),
) -> list[Group]:
    """The judged groups of all prompts, in order, on every rank.

    Args:
        ranks: that share the work; all of them call.
        engine: samples, with the same weights on every rank.
        environment: answers.
        prompts: the same on every rank, with distinct ids.
        rewards: judge.
        num_samples: of each prompt.
        options: of sampling.
        unscored: what a completion is worth that some of the functions could not judge.
        seed: of this round.
        limits: of an episode.

    Raises:
        LogitlessError: on every rank, what one of them met: an EngineError, where an engine elsewhere failed it.
    """
    clients = engine.clients if isinstance(engine, OneClientANode) else None
    mine = [prompts[i] for i in ranks.shared(len(prompts), clients)]
    groups: list[Group] = []
    with failing_together(ranks, "completions, sampled and judged"):
        if mine:
            if isinstance(environment, Driver):
                mine, episodes = environment.episodes(
                    engine, mine, num_samples=num_samples, options=options, seed=seed, limits=limits
                )
            else:
                episodes = play(
                    engine, mine, environment, num_samples=num_samples, options=options, seed=seed, limits=limits
                )
            groups = judge(mine, episodes, rewards, unscored=unscored)
    if ranks.world == 1:
        return groups
    rest, numbers = taken_apart(groups)
    of_ranks = list(zip(ranks.all_gather_object(rest), ranks.all_gather_bytes(numbers), strict=True))
    taking = range(ranks.world) if clients is None else clients
    return in_order([put_together(prompts[i :: len(taking)], *of_ranks[rank]) for i, rank in enumerate(taking)])
