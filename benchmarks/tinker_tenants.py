"""Tenants of one Tinker service against each of them alone: seconds, and tokens whose bits differ, which must be 0.

    python benchmarks/tinker_tenants.py                                 # Qwen2.5-0.5B under LoRA; prints JSON
    python benchmarks/tinker_tenants.py --workload 8x4-64-64 --cycles 60 --unembed  # shared passes; 10^6 tokens
    python benchmarks/tinker_tenants.py --tenants 1,2 --workload 2x2-8-4 --cycles 1  # a tiny model, to try it

A tenant is a process with a session, an adapter and prompts of its own; ranks differ (``--ranks``). It runs the cycles
of ``tinker_cycle.py`` and saves its state. First every tenant runs alone, one after the other; then 1, 3 and 8 of them
run at once on the same service. Compared bit by bit with the run alone: sampled tokens and their log-probs, log-probs
of ``forward_backward``, and at the end all weights and Adam's moments, which hold every gradient. ``ratio`` is the
seconds of a cycle with all tenants, divided by those of one alone: below the number of tenants, sharing pays.
``most_adapters_in_a_call`` says whether they shared passes and calls of the engine at all.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np

from script import command_line
from tinker_cycle import served, shown

COMPILING = 1
"""Cycles before those that are timed."""


def tenant(url: str, number: int, work: dict[str, Any], place: str, barrier: Any) -> None:
    """Run one tenant's cycles, from a barrier on; writes what it saw to ``place``."""
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
        for output, (_, s) in zip(outputs, sequences, strict=True):
            seen["tokens"] += s.tokens
            seen["logprobs"] += s.logprobs
            seen["trained"] += output["logprobs"].tolist()[before:]
    path = trainer.save_state(f"{Path(place).stem}").result().path
    dtypes = {"tokens": np.int32, "logprobs": np.float32, "trained": np.float32}
    arrays = {name: np.array(values, dtypes[name]) for name, values in seen.items()}
    np.savez(place, path=np.array(path), seconds=np.array(seconds), **arrays)


def at_once(url: str, numbers: list[int], work: dict[str, Any], folder: Path, name: str) -> list[dict[str, Any]]:
    """Run these tenants at once, each in a process; returns what each saw."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(numbers))
    places = [folder / f"{name}-{number}.npz" for number in numbers]
    started = [
        context.Process(target=tenant, args=(url, number, work, str(place), barrier))
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


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and differing tokens for each number of tenants."""
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
    found: dict[str, Any] = {
        **environment("cuda" if torch.cuda.is_available() else "cpu", ("torch", "triton", "tinker")),
        "model": options.model,
        "workload": options.workload,
        "ranks": work["ranks"],
        "unembed": options.unembed,
        "layers": options.layers,
    }
    with served(options.model, "--layers", options.layers) as (url, saved), tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        alone = [at_once(url, [number], work, folder, "alone")[0] for number in range(max(counts))]
        one = np.mean([each["seconds"][COMPILING:].mean() for each in alone])
        tokens = sum(len(each["tokens"]) for each in alone) / len(alone) / (COMPILING + options.cycles)
        found["alone"] = {"seconds": round(float(one), 4), "tokens_per_second": round(float(tokens / one))}
        for count in counts:
            seen = at_once(url, list(range(count)), work, folder, f"of{count}")
            pairs = list(zip(seen, alone, strict=False))
            whole = float(np.mean([each["seconds"][COMPILING:].mean() for each in seen]))
            states = [(of_state(saved, str(a["path"])), of_state(saved, str(b["path"]))) for a, b in pairs]
            with urlopen(Request(f"{url}/api/v1/memory", headers={"X-API-Key": os.environ["TINKER_API_KEY"]})) as reply:
                most = json.load(reply)["most_adapters_in_a_call"]
            found[f"{count} tenants"] = {
                "most_adapters_in_a_call": most,
                "seconds": round(whole, 4),
                "ratio": round(whole / float(one), 3),
                "tokens_per_second": round(count * float(tokens) / whole),
                "tokens_compared": sum(len(each["tokens"]) for each in seen),
                **{
                    f"{name}_that_differ": sum(differing(a[name], b[name]) for a, b in pairs)
                    for name in ("tokens", "logprobs", "trained")
                },
                "sampled_unlike_trained": sum(differing(each["logprobs"], each["trained"]) for each in seen),
                "state_compared": sum(len(a) for a, _ in states),
                "state_that_differs": sum(differing(a, b) for a, b in states),
            }
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, workload and tenants."""
    parser.add_argument("--model", default="qwen2.5-0.5b", help="of rollout.py, without -lora")
    parser.add_argument("--workload", default="64x8-512-128", help="prompts x samples - prompt tokens - new tokens")
    parser.add_argument("--tenants", default="1,3,8", help="numbers of tenants, by commas")
    parser.add_argument("--ranks", default="16,32,8", help="of the tenants in turn, by commas")
    parser.add_argument("--unembed", action="store_true", help="adapters of the LM head too")
    parser.add_argument("--cycles", type=int, default=2, help="that are timed, after one that compiles and captures")
    parser.add_argument("--layers", default="auto", help="of serve-tinker")
    parser.add_argument("--out", type=Path, help="a file for the JSON, beside printing it")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    os.environ.setdefault("TINKER_API_KEY", "tml-local")
    return shown(measured(options), options.out)


if __name__ == "__main__":
    parser = command_line(__doc__)
    add_arguments(parser)
    raise SystemExit(run(parser.parse_args()))
