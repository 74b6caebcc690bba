"""Tenants of one Tinker service against each of them alone: seconds, and tokens whose bits differ, which must be 0.

    python benchmarks/tinker_tenants.py                                 # Qwen2.5-0.5B under LoRA; prints JSON
    python benchmarks/tinker_tenants.py --workload 8x4-64-64 --cycles 60 --unembed  # shared passes; 10^6 tokens
    python benchmarks/tinker_tenants.py --tenants 1,2 --workload 2x2-8-4 --cycles 1  # a tiny model, to try it

A tenant is a process with a session, an adapter and prompts of its own; ranks differ (``--ranks``). It runs the cycles
of ``tinker_cycle.py`` and saves its state. First every tenant runs alone, one after the other; then 8, 3 and 1 of them
run at once. Each number of tenants has a service of its own. Compared bit by bit with the run alone: sampled tokens and
their log-probs, log-probs of ``forward_backward``, and at the end all weights and Adam's moments, which hold every
gradient. ``ratio`` is the seconds of a cycle with all tenants, divided by those of one alone: below the number of
tenants, sharing pays. ``most_adapters_in_a_call`` says whether they shared passes and calls of the engine at all.

``--out`` is written after each stage; what tenants did alone is kept in the folder of its name without the ending. A
run that was cut off goes on by the same command on the same machine.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np

from logitless.errors import ConfigurationError
from script import main
from tinker_cycle import served

COMPILING = 1
"""Cycles before those that are timed."""


def tenant(url: str, saved: Path, number: int, work: dict[str, Any], place: Path, barrier: Any) -> None:
    """Run one tenant's cycles, from a barrier on; writes what it saw, and its saved state, to ``place``."""
    import tinker
    from tinker import types

    client = tinker.ServiceClient(base_url=url)
    rank, before = work["ranks"][number % len(work["ranks"])], work["prompt_tokens"] - 1
    unembed = bool(work["unembed"])
    trainer = client.create_lora_training_client("model", rank=rank, seed=number, train_unembed=unembed).result()
    draws = np.random.default_rng(number)
    ids = draws.integers(3, 11, size=(work["prompts"], work["prompt_tokens"])).tolist()
    seen: dict[str, list[Any]] = {"tokens": [], "logprobs": [], "trained": []}
    seconds = []
    barrier.wait()
    for cycle in range(COMPILING + work["cycles"]):
        begin = time.perf_counter()
        params = types.SamplingParams(max_tokens=work["new_tokens"], seed=cycle)
        sampler = trainer.save_weights_and_get_sampling_client().result()
        futures = [sampler.sample(types.ModelInput.from_ints(each), work["samples"], params) for each in ids]
        sequences = [(p, s) for p, future in enumerate(futures) for s in future.result().sequences]
        data = []
        for index, (p, s) in enumerate(sequences):
            advantage = float(1 + number) * (1 - 2 * (index % 2))
            inputs = {
                "target_tokens": [0] * before + s.tokens,
                "logprobs": [0.0] * before + s.logprobs,
                "advantages": [0.0] * before + [advantage] * len(s.tokens),
            }
            model_input = types.ModelInput.from_ints(ids[p] + s.tokens[:-1])
            data.append(types.Datum(model_input=model_input, loss_fn_inputs=inputs))
        trained = trainer.forward_backward(data, "importance_sampling")
        trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        outputs = trained.result().loss_fn_outputs
        seconds.append(time.perf_counter() - begin)
        if number == 0 or barrier.parties == 1:  # of several at once the first speaks
            note(f"{place.stem}: cycle {cycle} took {seconds[-1]:.2f} s")
        for output, (_, s) in zip(outputs, sequences, strict=True):
            seen["tokens"] += s.tokens
            seen["logprobs"] += s.logprobs
            seen["trained"] += output["logprobs"].tolist()[before:]
    state = of_state(saved, trainer.save_state(place.stem).result().path)
    dtypes = {"tokens": np.int32, "logprobs": np.float32, "trained": np.float32}
    arrays = {name: np.array(values, dtypes[name]) for name, values in seen.items()}
    part = place.with_suffix(".part.npz")
    np.savez(part, state=state, seconds=np.array(seconds[COMPILING:]), **arrays)
    part.rename(place)  # whole, or not there


def at_once(
    service: tuple[str, Path], numbers: list[int], work: dict[str, Any], folder: Path, name: str
) -> list[dict[str, Any]]:
    """Run these tenants at once, each in a process; returns what each saw."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(numbers), timeout=600)  # one may fail before it
    places = [folder / f"{name}-{number}.npz" for number in numbers]
    started = [
        context.Process(target=tenant, args=(*service, number, work, place, barrier))
        for number, place in zip(numbers, places, strict=True)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()
        if process.exitcode:
            raise SystemExit(f"a tenant of {name} failed: its message is above")
    return [dict(np.load(place)) for place in places]


def differing(a: np.ndarray, b: np.ndarray) -> int:
    """Numbers whose bits differ; all of them where there are more in one."""
    if a.shape != b.shape:
        return max(a.size, b.size)
    return int((a.view(np.uint32) != b.view(np.uint32)).sum())


def of_state(saved: Path, path: str) -> np.ndarray:
    """All numbers of a saved state, as one vector."""
    from safetensors.numpy import load_file

    place = saved / path.removeprefix("tinker://")
    files = [load_file(place / f"{name}.safetensors") for name in ("adapter_model", "optimizer")]
    return np.concatenate([file[name].astype(np.float32).ravel() for file in files for name in sorted(file)])


def note(said: str) -> None:
    """Say how far it is; results alone go to standard output."""
    print(said, file=sys.stderr, flush=True)


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and differing tokens for each number of tenants; writes ``options.out`` after each."""
    import torch

    from logitless.bench.machine import environment
    from rollout_workloads import Workload

    shape = Workload.parse(options.workload)
    counts = [int(count) for count in options.tenants.split(",")]
    work: dict[str, Any] = {
        "prompts": shape.prompts,
        "samples": shape.samples,
        "prompt_tokens": shape.prompt_tokens,
        "new_tokens": shape.most,
        "cycles": options.cycles,
        "ranks": [int(rank) for rank in options.ranks.split(",")],
        "unembed": options.unembed,
    }
    settings: dict[str, Any] = {
        **environment("cuda" if torch.cuda.is_available() else "cpu", ("torch", "triton", "tinker")),
        "model": options.model,
        "workload": options.workload,
        "cycles": options.cycles,
        "ranks": work["ranks"],
        "unembed": options.unembed,
        "layers": options.layers,
    }
    with tempfile.TemporaryDirectory() as made:
        out = options.out or Path(made, "tenants.json")
        found = begun(out, settings)
        folder = out.with_suffix("")
        folder.mkdir(exist_ok=True)
        lone = alone(options, max(counts), work, folder)
        one = float(np.mean([each["seconds"].mean() for each in lone]))
        tokens = sum(len(each["tokens"]) for each in lone) / len(lone) / (COMPILING + options.cycles)
        found["alone"] = {"seconds": round(one, 4), "tokens_per_second": round(tokens / one)}
        write(found, out)
        for count in counts:
            if f"{count} tenants" not in found:
                note(f"{count} at once")
                found[f"{count} tenants"] = together(options, work, lone[:count], one, tokens, Path(made))
                write(found, out)
    return found


def begun(out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What an earlier run with these settings has written, or the settings alone."""
    found = json.loads(out.read_text()) if out.exists() else settings
    if other := [name for name, value in settings.items() if found.get(name) != value]:
        raise ConfigurationError(
            needed=f"--out of a run with the same {', '.join(other)}", given=str(out), remedy="Name another file."
        )
    write(found, out)  # at once: it says what the arrays beside it are of
    return found


def write(found: dict[str, Any], out: Path) -> None:
    """The stages that there are, as JSON."""
    out.write_text(json.dumps(found, indent=1) + "\n")


def alone(options: argparse.Namespace, most: int, work: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """What each tenant saw alone; those whose file is in the folder do not run again."""
    missing = [number for number in range(most) if not (folder / f"alone-{number}.npz").exists()]
    if missing:
        with served(options.model, "--layers", options.layers) as service:
            for number in missing:
                note(f"tenant {number} alone, of {most}")
                at_once(service, [number], work, folder, "alone")
    return [dict(np.load(folder / f"alone-{number}.npz")) for number in range(most)]


def together(
    options: argparse.Namespace, work: dict[str, Any], lone: list[dict[str, Any]], one: float, tokens: float, made: Path
) -> dict[str, Any]:
    """As many tenants at once as ran ``lone``, compared with those, whose cycle took ``one`` seconds for ``tokens``."""
    count = len(lone)
    with served(options.model, "--layers", options.layers) as service:
        seen = at_once(service, list(range(count)), work, made, f"of{count}")
        headers = {"X-API-Key": os.environ["TINKER_API_KEY"]}
        with urlopen(Request(f"{service[0]}/api/v1/memory", headers=headers)) as reply:
            most = json.load(reply)["most_adapters_in_a_call"]
    whole = float(np.mean([each["seconds"].mean() for each in seen]))
    differ = {
        name: sum(differing(a[name], b[name]) for a, b in zip(seen, lone, strict=True))
        for name in ("tokens", "logprobs", "trained", "state")
    }
    return {
        "most_adapters_in_a_call": most,
        "seconds": round(whole, 4),
        "ratio": round(whole / one, 3),
        "tokens_per_second": round(count * tokens / whole),
        "tokens_compared": sum(len(each["tokens"]) for each in seen),
        **{f"{name}_that_differ": differ[name] for name in ("tokens", "logprobs", "trained")},
        "sampled_unlike_trained": sum(differing(each["logprobs"], each["trained"]) for each in seen),
        "state_compared": sum(len(each["state"]) for each in seen),
        "state_that_differs": differ["state"],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, workload and tenants."""
    parser.add_argument("--model", default="qwen2.5-0.5b", help="of rollout.py, without -lora")
    parser.add_argument("--workload", default="64x8-512-128", help="prompts x samples - prompt tokens - new tokens")
    parser.add_argument("--tenants", default="8,3,1", help="numbers of tenants, by commas")
    parser.add_argument("--ranks", default="16,32,8", help="of the tenants in turn, by commas")
    parser.add_argument("--unembed", action="store_true", help="adapters of the LM head too")
    parser.add_argument("--cycles", type=int, default=2, help="that are timed, after one that compiles and captures")
    parser.add_argument("--layers", default="auto", help="of serve-tinker")
    parser.add_argument("--out", type=Path, help="a file for the JSON, beside printing it")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    os.environ.setdefault("TINKER_API_KEY", "tml-local")
    print(json.dumps(measured(options), indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.modules[__name__]))
