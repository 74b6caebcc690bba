"""Kills runs at random moments, resumes them, and compares the results with an undisturbed run.

    python benchmarks/kills.py                 # 100 kill -9 and 100 SIGTERM; minutes
    python benchmarks/kills.py --kills 3       # a look
    python benchmarks/kills.py --signals SIGTERM   # one of the two; the other's result stays in the file
    python benchmarks/kills.py --beside --kills 20 # one of two processes: one trains, the other samples a block ahead

A run is a few blocks of a small recipe with a checkpoint after each block, so that many kills hit a save. It is killed
and resumed until it ends by itself, and then must be bitwise identical to the undisturbed run: every tensor of its last
checkpoint, its exported weights, its metrics (except times and memory) and its rollouts. Every run is a fork of one
process that has imported everything; the report is left out. Of two processes (``--beside``, over gloo) the one that is
left ends by itself, or is killed after ``PATIENCE`` seconds, as torchrun would.
"""

import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from logitless.bench.machine import environment, write_result
from logitless.distributed import exit_reasons
from logitless.distributed.ranks import ranks_of_environment
from logitless.train import run
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.loading import load_recipe
from logitless.train.record.metrics import repeatable
from logitless.train.record.run_folder import RunFolder
from logitless.train.store.checkpoint import checkpoints, read_checkpoint
from script import RESULTS, ROOT, command_line, processor

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM}
STOPPED, FAILED = 3, 1
PATIENCE = 5.0
BESIDE = ["rollout.staleness=1", "parallel.sampling=1"]

SMALL = [
    "model.source.intermediate_size=512",
    "data.train.size=16",
    "data.held_out={name: reasoning_gym, task: palindrome_generation, size: 4, seed: 2}",
    "rollout.prompts_per_block=4",
    "rollout.completions_per_prompt=4",
    "rollout.sampling.max_new_tokens=8",
    "train.blocks=4",
    "train.epochs_per_block=2",
    "train.tokens_per_step=64",
    "kl={placement: loss, control: {name: proportional, beta: 0.02, target: 0.05}}",
    "evaluation.every_blocks=2",
    "checkpoint={every_blocks: 1, keep: 2}",
    "model.device=cpu",
    "writers=[]",
]


def recipe_in(output: Path, settings: Sequence[str]) -> Recipe:
    """The run that is killed."""
    return load_recipe(ROOT / "recipes" / "length-toy.yaml", [*settings, f"output={output}"])


def fork(recipe: Recipe, log: Path) -> list[int]:
    """Start the run, or continue it, in one child or in two, by the recipe; returns their numbers."""
    world = 1 + recipe.parallel.num_sampling
    store = None if world == 1 else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    numbers = {} if store is None else {"WORLD_SIZE": world, "MASTER_PORT": store.port, "TORCHELASTIC_RUN_ID": 0}
    children = []
    for rank in range(world):
        children.append(os.fork())
        if not children[-1]:
            os.environ |= {name: str(number) for name, number in numbers.items()}
            if store is not None:
                exit_reasons.GRACE_SECONDS = 1.0
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
                os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
            _be(recipe, log)
    _STORES[:] = [store]  # while they run
    return children


_STORES = list[Any]()


def _be(recipe: Recipe, log: Path) -> None:
    """Be a child."""
    status = FAILED
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        resume = RunFolder(Path(recipe.output) / recipe.name).config.exists()
        with ranks_of_environment("cpu") as ranks:
            status = 0 if run.run_recipe(recipe, resume=resume, ranks=ranks).complete else STOPPED
    except KeyboardInterrupt as interrupt:  # a signal before there was anything to save; the command line ends so too
        status = 128 + interrupt.args[0]
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def ended(children: Sequence[int]) -> int:
    """Exit status of a run, negative where a process of it was killed."""
    statuses, deadline = dict[int, int](), float("inf")
    while len(statuses) < len(children):
        for child in children:
            if child in statuses:
                continue
            found, status = os.waitpid(child, 0 if len(children) == 1 else os.WNOHANG)
            if found:
                statuses[child] = os.waitstatus_to_exitcode(status)
                deadline = min(deadline, time.monotonic() + PATIENCE if statuses[child] else deadline)
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.0 if len(children) == 1 else 0.01)
    return min(statuses.values()) or max(statuses.values())


def difference(one: RunFolder, other: RunFolder) -> str | None:
    """The first thing in which two finished runs differ."""
    ends = [read_checkpoint(checkpoints(folder.checkpoints)[-1]) for folder in (one, other)]
    if ends[0].folder.name != ends[1].folder.name or list(ends[0].tensors) != list(ends[1].tensors):
        return f"{ends[0].folder.name} or its tensors"
    for name, tensor in ends[0].tensors.items():
        if not torch.equal(tensor.reshape(-1).view(torch.uint8), ends[1].tensors[name].reshape(-1).view(torch.uint8)):
            return name
    files = [(folder.model / "model.safetensors").read_bytes() for folder in (one, other)]
    if files[0] != files[1]:
        return "exported weights"
    if [repeatable(r) for r in one.read_metrics()] != [repeatable(r) for r in other.read_metrics()]:
        return "metrics"
    if list(one.read_rollouts()) != list(other.read_rollouts()):
        return "rollouts"
    return None


def kill_until(
    kills: int, name: str, reference: RunFolder, seconds: float, work: Path, seed: int, settings: Sequence[str]
) -> dict[str, Any]:
    """Kill runs with a signal, ``kills`` times in all, and let each end.

    Args:
        kills: of all runs together.
        name: of the signal.
        reference: the run that was left alone.
        seconds: that it took. A kill comes at any moment of the first half of that after a start or a continuation;
            the span grows where a busy machine lets no run get further, and shrinks where runs end before a kill.
        work: folder for the runs.
        seed: of the moments.
        settings: of the runs.
    """
    began, alone = time.perf_counter(), seconds
    draw, where = random.Random(seed), Counter[str]()
    done, runs, differ, failures, stuck = 0, 0, list[str](), list[str](), 0
    while done < kills:
        output, runs = work / f"{name}-{runs}", runs + 1
        output.mkdir()
        recipe, log = recipe_in(output, settings), output / "log"
        folder = RunFolder(output / recipe.name)
        while True:
            before, saved = _starts(folder), checkpoints(folder.checkpoints)
            children = fork(recipe, log)
            if done < kills:  # else this run goes on to its end
                time.sleep(draw.uniform(0.0, 0.5 * seconds))
                os.kill(children[0] if len(children) == 1 else draw.choice(children), SIGNALS[name])
            status = ended(children)
            if status == 0:
                seconds *= 0.9
                break
            stuck = stuck + 1 if checkpoints(folder.checkpoints) == saved else 0
            if stuck == 3:
                seconds, stuck = seconds * 1.3, 0
            if status == FAILED or len(failures) > 3:
                failures.append(log.read_text()[-2000:])
                break
            done += 1
            where["stopped and saved" if status == STOPPED else _moment(folder, before)] += 1
        if status == 0 and (what := difference(reference, folder)) is not None:
            differ.append(what)
    return {
        "kills": done,
        "runs": runs,
        "where": dict(where),
        "runs_that_differ": differ,
        "failures": failures,
        "seconds": time.perf_counter() - began,
        "seconds_of_a_run_left_alone": alone,
    }


def _starts(folder: RunFolder) -> int:
    """How often the run has got past its checks."""
    return len(json.loads(folder.provenance.read_text())["starts"]) if folder.provenance.exists() else 0


def _moment(folder: RunFolder, starts_before: int) -> str:
    """Where in a run a kill that left no time for anything fell."""
    if list(folder.checkpoints.glob(".saving-*")):
        return "during a save"
    if list(folder.checkpoints.glob(".removing-*")):
        return "during the removal of an old checkpoint"
    if _starts(folder) == starts_before:
        return "while starting"
    return "between saves" if checkpoints(folder.checkpoints) else "before the first checkpoint"


def measure(
    kills: int, seed: int = 0, names: Sequence[str] = tuple(SIGNALS), more: Sequence[str] = ()
) -> dict[str, Any]:
    """Kill by each signal, and say on what machine."""
    settings = [*SMALL, *more]
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    run.write_report = lambda path: path  # type: ignore[assignment,attr-defined]
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        recipe = recipe_in(work / "alone", settings)
        (work / "alone").mkdir()
        start = time.perf_counter()
        if ended(fork(recipe, work / "alone" / "log")):
            raise RuntimeError((work / "alone" / "log").read_text())
        seconds = time.perf_counter() - start
        reference = RunFolder(work / "alone" / recipe.name)
        found = {
            name: kill_until(kills, name, reference, seconds, work, seed + number, settings)
            for number, name in enumerate(SIGNALS)
            if name in names
        }
    return {
        "machine": {"cpu": processor(), "cores": os.cpu_count(), "python": platform.python_version()}
        | environment("cpu", ("transformers", "safetensors")),
        "recipe": "length-toy with " + ", ".join(settings),
        "seed": seed,
        "signals": found,
    }


def main() -> int:
    """Measure, print and write."""
    parser = command_line(__doc__)
    parser.add_argument("--kills", type=int, default=100, help="of each signal")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--signals", nargs="+", choices=tuple(SIGNALS), default=tuple(SIGNALS))
    parser.add_argument("--beside", action="store_true", help="two processes, and SIGKILL alone")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names, more = (("SIGKILL",), BESIDE) if options.beside else (options.signals, [])
    options.out = options.out or (RESULTS / "kills-beside.json" if options.beside else RESULTS / "kills.json")
    found = measure(options.kills, options.seed, names, more)
    before = json.loads(options.out.read_text()) if options.out.exists() else {}
    if all(before.get(key) == found[key] for key in ("machine", "recipe", "seed")):
        found["signals"] = {**before["signals"], **found["signals"]}
    write_result(options.out, found)
    bad = 0
    for name, numbers in found["signals"].items():
        bad += len(numbers["runs_that_differ"]) + len(numbers["failures"])
        print(f"{name}: {numbers}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
