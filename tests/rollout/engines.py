"""The common part of fake engines, and an episode with one of them."""

from logitless.rollout.environment import play
from logitless.rollout.sampling import SamplingOptions


class StandIn:
    """An engine without ``sample``."""

    version = 0

    def load(self, weights, version):
        self.version = version

    def close(self):
        pass


def episode_of(engine, environment, prompt, *, max_new_tokens=4, **more):
    """The one episode of one prompt."""
    options = SamplingOptions(max_new_tokens=max_new_tokens)
    [[episode]] = play(engine, [prompt], environment, num_samples=1, options=options, seed=0, **more)
    return episode
