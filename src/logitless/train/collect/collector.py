"""The collector: samples the next block with engine and environment, and scores it with the rewards.

With several ranks each takes its share of the prompts, and all of them get all groups. A completion is sampled by a
seed from the run's seed, the prompt's id and the sample's number, and a verdict reads one completion, so that it makes
no difference which rank does it. Only rounding differs: logits depend in their last bits on what else is in the decode
batch, which changes fewer than one in a million tokens sampled from float32 logits.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from logitless.data.mixing import MixedOrder
from logitless.data.prompts import PromptOrder
from logitless.distributed.failing import failing_together
from logitless.distributed.ranks import Ranks
from logitless.distributed.shares import in_order
from logitless.errors import EngineError
from logitless.rewards.reward import Unscored, WeightedReward, judge
from logitless.rollout.engine import Engine, is_exact, together
from logitless.rollout.environment import Driver, Environment, Limits, play
from logitless.rollout.sampling import SamplingOptions
from logitless.seeds import derived_seed
from logitless.train.block import JudgedBlock, have_signal
from logitless.train.collect.group_json import decode_groups, encode_groups
from logitless.train.collect.one_client import ranks_that_sample
from logitless.train.collect.stopping import StoppedTogether
from logitless.train.recipe.rollout import RolloutSection
from logitless.types import Episode, Group, Prompt


class Collector:
    """Takes prompts in order, samples and scores completions, and refills zero-signal groups.

    Args:
        ranks: that divide the prompts; every rank gets the whole block.
        order: of the prompts; None: a random permutation an epoch, from the seed.
        greedy_baseline: whether each group gets the reward of a greedy completion of its prompt.
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
        greedy_baseline: bool = False,
    ) -> None:
        self.greedy_baseline = greedy_baseline
        self.ranks = ranks
        self.prompts, self.engine, self.environment = prompts, engine, environment
        self.rewards, self.options, self.seed = rewards, options, seed
        self.order = order or PromptOrder(len(prompts), derived_seed(seed, "order"))

    def under(self, options: RolloutSection) -> "Collector":
        """The same collector under other settings; both share the position in the prompts."""
        other = copy(self)
        other.options = options
        return other

    def expect(self, version: int) -> None:
        """Accept completions of weights up to this version, which the engine is given next.

        Until the first call no version is checked.
        """
        self._newest = version

    def next(self, block: int, *, length_factor: float = 1.0) -> JudgedBlock:
        """Sample and score until there are enough groups to train on or the refills are used up.

        Args:
            block: number, from 0; with the run's seed it determines all randomness.
            length_factor: multiplies ``max_new_tokens``.
        """
        options, sampling = self.options, self.sampling(length_factor)
        sampler = self.sampler
        sampled, kept, rounds = list[Group](), list[bool](), 0
        limit = 1 + (options.max_refills if options.zero_signal == "refill" else 0)
        while rounds < limit and sum(kept) < options.prompts_per_block:
            prompts = [self.prompts[i] for i in self.order.next(options.prompts_per_block - sum(kept))]
            seed = derived_seed(self.seed, "rollout", block, rounds)
            groups = sampler(prompts, options.completions_per_prompt, sampling, seed=seed)
            if self.greedy_baseline:
                greedy = sampler(prompts, 1, sampling.greedy(), seed=seed)
                groups = [replace(g, baseline=b.rewards[0]) for g, b in zip(groups, greedy, strict=True)]
            sampled += groups
            kept += [True] * len(groups) if options.zero_signal == "keep" else have_signal(groups)
            rounds += 1
        return self.checked(JudgedBlock(tuple(sampled), tuple(kept), rounds))

    @property
    def sampler(self) -> "GroupSampler":
        """What samples the groups, under the current settings."""
        options = self.options
        return GroupSampler(self.engine, self.environment, self.rewards, options.unscored, options.limits, self.ranks)

    @property
    def is_exact(self) -> bool:
        """Whether the engine is exact on every rank: all make a scoring pass, or none. A collective."""
        return not self.ranks.any(not is_exact(self.engine))

    def checked(self, block: JudgedBlock) -> JudgedBlock:
        """Return the block with ``exact``, after a check that its weights were given to the engine. A collective.

        Recorded completions are not checked.

        Raises:
            EngineError: a completion has no version, or a newer one.
        """
        block = replace(block, exact=self.is_exact)
        if self._newest is None or self.options.engine.samples_nothing:
            return block
        for completion in (each for group in block.sampled for each in group.completions if each.length):
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
        """The sampling settings with a multiple of ``max_new_tokens``, at least 1."""
        options = self.options.sampling
        if length_factor == 1:
            return options
        return replace(options, max_new_tokens=max(1, int(options.max_new_tokens * length_factor)))

    def settle(self, done: int, *, in_training: bool) -> None:
        """Wait until a checkpoint has all that a resumed run cannot sample again; here it has.

        Args:
            in_training: whether the checkpoint is in the middle of a block.
        """

    def close(self) -> None:
        """Stop what runs between blocks; here nothing does."""

    def state_dict(self) -> dict[str, Any]:
        """The position in the prompts, as JSON."""
        return self.order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        self.order.load_state_dict(state)


@dataclass(frozen=True)
class GroupSampler:
    """Samples completions of prompts and scores them; every rank gets all groups, in order.

    Args:
        unscored: what happens to a completion that some rewards could not score.
        ranks: that divide the prompts.
    """

    engine: Engine
    environment: Environment | Driver
    rewards: Sequence[WeightedReward]
    unscored: Unscored
    limits: Limits = field(default_factory=Limits)
    ranks: Ranks = field(default_factory=Ranks.alone)

    def __call__(
        self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
    ) -> list[Group]:
        """The groups of the prompts. A collective.

        Args:
            prompts: the same on every rank, with distinct ids.

        Raises:
            LogitlessError: on every rank, the error of the one that failed.
            StoppedTogether: on every rank, where some ended in ``stopping_together``.
        """
        ranks, engine, environment = self.ranks, self.engine, self.environment
        taking = ranks_that_sample(engine, ranks)
        mine = [prompts[i] for i in ranks.shared(len(prompts), taking)]
        how: Any = {"num_samples": num_samples, "options": options, "seed": seed, "limits": self.limits}
        groups: list[Group] = []
        stopped = False
        with failing_together(ranks, "completions, sampled and scored"), suppress(StoppedTogether):
            stopped = True  # unless this block ends
            with together(engine):
                episodes: list[list[Episode]] = []
                if not mine:
                    pass
                elif isinstance(environment, Driver):
                    mine, episodes = environment.episodes(engine, mine, **how)
                else:
                    episodes = play(engine, mine, environment, **how)
            if mine:
                groups = judge(mine, episodes, self.rewards, unscored=self.unscored)
            stopped = False
        if ranks.world == 1:
            return groups
        rest, numbers = encode_groups(groups)
        rests = ranks.all_gather_object(None if stopped else rest)
        if None in rests:
            raise StoppedTogether
        of_ranks = list(zip(rests, ranks.all_gather_bytes(numbers), strict=True))
        return in_order([decode_groups(prompts[i :: len(taking)], *of_ranks[rank]) for i, rank in enumerate(taking)])
