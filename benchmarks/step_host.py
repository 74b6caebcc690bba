"""What a training step costs its host: time of each part, the dearest functions, and where the GPU waits for it.

    python benchmarks/step_host.py                          # Qwen2.5-0.5B on a GPU, a report on the screen
    python benchmarks/step_host.py --models tiny --device cpu --workloads long

A step is bound by its host where the parts below take as long as the whole step, and by the GPU where its kernels do.
The functions are those of ``cProfile``, which makes them slower than they are; the parts' times are without it.
"""

import argparse
import cProfile
import io
import json
import pstats
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from logitless.objective.objective import Objective
from logitless.train.learn import learner, step
from logitless.train.learn.policy import Policy
from logitless.train.learn.score import scores_of
from shapes import SHAPES, Shape
from step_contenders import Rollouts
from step_profile import kernel_class
from step_rows import Reference, Stage, Stepper


class Parts:
    """Seconds of host time by part of a step; a part inside of another is counted once, as the inner one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, and its time in the part ``name``."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - begin
                self.seconds[name] += spent - self._inner.pop()
                self._inner[-1] += spent

        return timed

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, steps of the learner are timed by part."""
        watched: list[tuple[Any, str, str]] = [
            (learner.Learner, "begin", "plan"),
            (step.OptimizerStep, "micro_batches", "weights and micro-batches"),
            (step.OptimizerStep, "zero_advantage_output", "numbers of zero-advantage sequences"),
            (Policy, "scores", "forward"),
            (Objective, "__call__", "objective"),
            (torch.Tensor, "backward", "backward"),
            (learner, "take_step", "optimizer"),
            (step, "step_diagnostics", "diagnostics"),
        ]
        patches = [mock.patch.object(of, name, self.around(part, getattr(of, name))) for of, name, part in watched]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed_steps(
    take: Callable[[], object], restore: Callable[[], object], device: str, steps: int
) -> tuple[float, dict[str, float]]:
    """Median milliseconds of a step and of each part."""
    wall, parts = list[float](), list[dict[str, float]]()
    for _ in range(steps):
        watched = Parts()
        synchronize(device)
        with watched.watching():
            begin = time.perf_counter()
            take()
            synchronize(device)
            wall.append(1000 * (time.perf_counter() - begin))
        parts.append({name: 1000 * seconds for name, seconds in watched.seconds.items()})
        restore()
    medians = {name: statistics.median(each.get(name, 0.0) for each in parts) for name in parts[0]}
    return statistics.median(wall), medians


def dearest_functions(take: Callable[[], object], restore: Callable[[], object], top: int) -> str:
    """Functions of a step by their own time and by cumulative time; the backward pass runs in this thread for it."""
    profile = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        profile.enable()
        take()
        profile.disable()
    restore()
    text = io.StringIO()
    stats = pstats.Stats(profile, stream=text)
    for order in ("tottime", "cumtime"):
        stats.sort_stats(order).print_stats(top)
    return text.getvalue()


def on_the_device(take: Callable[[], object], restore: Callable[[], object]) -> dict[str, Any]:
    """Busy and idle milliseconds of the GPU in a step, launches by kernel, before which kernels it was idle, and what
    calls of the driver cost the host."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        take()
        torch.cuda.synchronize()
    restore()
    events = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in recorded.events() or ()
        if event.device_type.name == "CUDA"
    )
    launches, busy, idle = Counter[str](), Counter[str](), Counter[str]()
    end = events[0][0]
    for begin, finish, name in events:
        launches[name[:110]] += 1
        busy[name[:110]] += finish - begin
        idle[name[:110]] += max(0, begin - end)
        end = max(end, finish)
    classes = Counter(kernel_class(name) for _, _, name in events)
    calls, spent = Counter[str](), Counter[str]()
    for event in recorded.events() or ():
        if event.device_type.name == "CPU" and event.name.startswith("cu"):
            calls[event.name] += 1
            spent[event.name] += event.time_range.end - event.time_range.start
    return {
        "launches": len(events),
        "busy_ms": sum(busy.values()) / 1000,
        "idle_ms": sum(idle.values()) / 1000,
        "classes": dict(classes.most_common()),
        "driver": {name: (n, round(spent[name] / 1000, 3)) for name, n in calls.most_common(12)},
        "most_launched": [(name, n, round(busy[name] / 1000, 3)) for name, n in launches.most_common(40)],
        "idle_before": [(name, round(us / 1000, 3)) for name, us in idle.most_common(25)],
    }


def report(shape: Shape, workload: str, live: float, stage: Stage, steps: int, top: int, output: Path) -> None:
    """One workload on the screen, and whole in a file."""
    rollouts = Rollouts.draw(shape.workload(workload), shape.vocabulary).with_live(live)
    stepper: Stepper | str = stage.stepper("logitless", rollouts)
    assert not isinstance(stepper, str)
    plan = rollouts.plan.micro_batches
    logp = scores_of(stage.policy, rollouts.packed, plan, temperature=1.0, backend="auto").logp
    reference = Reference(logp.cpu(), {}, None, None)

    def take() -> None:
        stepper.step(rollouts, reference)

    for _ in range(2):
        take()
        stage.restore()
    wall, parts = timed_steps(take, stage.restore, stage.device, steps)
    found: dict[str, Any] = {"model": shape.name, "workload": workload, "live": live, "step_ms": wall, "parts": parts}
    if stage.device == "cuda":
        found |= on_the_device(take, stage.restore)
    print(json.dumps({name: value for name, value in found.items() if not isinstance(value, list)}), flush=True)
    output.mkdir(parents=True, exist_ok=True)
    name = f"{shape.name}-{workload.replace('/', '_')}-{live:g}"
    (output / f"{name}.json").write_text(json.dumps(found, indent=1))
    (output / f"{name}.txt").write_text(dearest_functions(take, stage.restore, top))


def main() -> None:
    """Reads the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen2.5-0.5b", help="by commas")
    parser.add_argument("--workloads", default="long,512/64-256", help="by commas")
    parser.add_argument("--live", default="1,0.5", help="fractions of groups with an advantage, by commas")
    parser.add_argument("--steps", type=int, default=7, help="timed of each workload")
    parser.add_argument("--top", type=int, default=60, help="functions that are listed")
    parser.add_argument("--output", type=Path, default=Path("runs/step-host"), help="folder of the whole reports")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try this script")
    args = parser.parse_args()
    for name in args.models.split(","):
        shape = next(each for each in SHAPES if each.name == name)
        stage = Stage(shape, args.device, "row-invariant", "float32")
        for workload in args.workloads.split(","):
            for live in args.live.split(","):
                report(shape, workload, float(live), stage, args.steps, args.top, args.output)


if __name__ == "__main__":
    main()
