"""The experts that an engine's decoding steps send each sampled token to, for the law of ``rollout.py``."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from logitless.models.router import Choice, Routers
from logitless.rollout.gpu.steps import Begin, Log, Place, Steps


class Routes:
    """Notes what the routers choose in decoding steps, also in those that a CUDA graph replays.

    Routers are read while a step is captured, so that the copies of their choices are part of the graph.

    Args:
        routers: of the model that is sampled from.
    """

    def __init__(self, routers: Routers) -> None:
        self.routers = routers
        self._found: dict[int, list[Tensor]] = {}

    def of(self, key: int) -> Tensor:
        """Experts [T, L, K] of the tokens of a completion, by the key of its random numbers."""
        return torch.cat(self._found[key])

    def watch(self, steps: Steps) -> None:
        """Note the choices of these steps, which have no graph yet."""
        shape = (steps.num_steps, self.routers.num_layers, steps.max_rows, self.routers.experts_per_token)
        chosen = torch.zeros(shape, dtype=torch.long, device=steps.device)
        keys = dict[int, int]()  # by slot
        begin, one_step, run = steps.begin, steps._step, steps.run

        def begun(new: Sequence[Begin], sampling: Any) -> None:
            keys.update((each.slot, each.key) for each in new)
            self._found.update((each.key, []) for each in new)
            begin(new, sampling)

        def stepped(rows: int, *arguments: Any) -> None:
            with self.routers.read() as choices:
                one_step(rows, *arguments)
            for layer, choice in enumerate(choices):
                chosen[:, layer, :rows].index_copy_(0, steps.step, choice.experts[None])

        def ran(place: Place, rows: int, sampling: Any) -> Callable[[], Log]:
            wait = run(place, rows, sampling)
            owners = [keys[slot] for slot in place.slots]
            own = chosen[:, :, : len(owners)].clone()  # the next round writes there before this one is waited for

            def waited() -> Log:
                log = wait()
                alive, on_host = (log.flags & 1) > 0, own.cpu()
                for row, key in enumerate(owners):
                    self._found[key].append(on_host[alive[:, row], :, row])
                return log

            return waited

        steps.begin, steps._step, steps.run = begun, stepped, ran  # type: ignore[method-assign]


def routes_of(choices: Sequence[Choice], source: Tensor) -> Tensor:
    """Experts [N, L, K] of the rows ``source`` of a packed pass, which predict its targets; on the CPU."""
    return torch.stack([choice.experts.cpu()[source.cpu()] for choice in choices], 1)
