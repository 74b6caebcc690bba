"""Seconds of a cycle of the Tinker service, against a block of `logitless train` with the same numbers.

    python benchmarks/tinker_cycle.py                                   # Qwen2.5-0.5B under LoRA; prints JSON
    python benchmarks/tinker_cycle.py --workload 2x2-8-4                 # without a GPU a tiny model, to try it

A cycle is the cookbook's: weights for a sampler, samples of every prompt, forward_backward (importance_sampling) and
optim_step, by the SDK in another process. ``small`` is a cycle of one prompt with 4 samples of 32 tokens. The model has
random weights, so that completions have their full length. ``calls`` are those of the service's thread in a cycle:
passes are requests of forward_backward, of which the SDK makes several. What its seconds lack of the client's is HTTP,
waiting for further requests, and the client.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from script import command_line

CYCLES = 3
"""That are timed, after two that compile and capture."""

TINY = {"model_type": "qwen3", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 11}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 1024}


def calls(url: str) -> dict[str, dict[str, float]]:
    """Of the service's thread so far; of a service that does not count them, none."""
    with urlopen(Request(f"{url}/api/v1/memory", headers={"X-API-Key": os.environ["TINKER_API_KEY"]})) as reply:
        return dict(json.load(reply).get("calls", {}))


def cycles(url: str, *, prompts: Sequence[Sequence[int]], samples: int, new_tokens: int, rank: int) -> dict[str, Any]:
    """Mean seconds of the phases of a cycle."""
    import tinker
    from tinker import types

    client = tinker.ServiceClient(base_url=url)
    trainer = client.create_lora_training_client("model", rank=rank, train_unembed=False).result()
    ids, prompt_tokens = [list(each) for each in prompts], len(prompts[0])
    params, phases = types.SamplingParams(max_tokens=new_tokens), {"weights": 0.0, "sample": 0.0, "train": 0.0}
    kl = sampled = 0.0
    for cycle in range(CYCLES + 2):
        if cycle == 2:
            before_timed = calls(url)
        marks = [time.perf_counter()]
        sampler = trainer.save_weights_and_get_sampling_client().result()
        marks.append(time.perf_counter())
        futures = [sampler.sample(types.ModelInput.from_ints(each), samples, params) for each in ids]
        sequences = [(p, s) for p, future in enumerate(futures) for s in future.result().sequences]
        marks.append(time.perf_counter())
        data = []
        for number, (p, s) in enumerate(sequences):
            before = prompt_tokens - 1
            inputs = {
                "target_tokens": [0] * before + s.tokens,
                "logprobs": [0.0] * before + s.logprobs,
                "advantages": [0.0] * before + [1.0 - 2.0 * (number % 2)] * len(s.tokens),
            }
            model_input = types.ModelInput.from_ints(ids[p] + s.tokens[:-1])
            data.append(types.Datum(model_input=model_input, loss_fn_inputs=inputs))
        trained = trainer.forward_backward(data, "importance_sampling")
        trainer.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        outputs = trained.result().loss_fn_outputs
        marks.append(time.perf_counter())
        pairs = zip(outputs, sequences, strict=True)
        scored = [(o["logprobs"].tolist()[prompt_tokens - 1 :], s.logprobs) for o, (_, s) in pairs]
        differences = [abs(a - b) for ours, theirs in scored for a, b in zip(ours, theirs, strict=True)]
        kl = max(kl, *differences)
        if cycle >= 2:
            sampled += len(differences)
            for name, begin, end in zip(phases, marks, marks[1:], strict=False):
                phases[name] += (end - begin) / CYCLES
    whole = sum(phases.values())
    found = {f"{name}_seconds": round(seconds, 4) for name, seconds in phases.items()}
    counted = {
        kind: {name: round((value - before_timed[kind][name]) / CYCLES, 4) for name, value in of_kind.items()}
        for kind, of_kind in calls(url).items()
    }
    return {
        **found,
        "calls": counted,
        "seconds": round(whole, 4),
        "tokens_per_second": round(sampled / CYCLES / whole),
        "largest_difference": kl,
    }


@contextmanager
def served(model: str, *options: str) -> Iterator[tuple[str, Path]]:
    """URL and checkpoint folder of a service of this model with random weights; without a GPU of a tiny one."""
    import torch

    from logitless.models.char_tokenizer import character_tokenizer
    from logitless.models.loading import load_model
    from rollout_contenders import build

    with tempfile.TemporaryDirectory() as folder:
        made = build(model, torch.bfloat16) if torch.cuda.is_available() else load_model(TINY, random_weights=True)
        made.save_pretrained(folder)
        character_tokenizer("abcdefgh").save_pretrained(folder)
        del made
        command = [sys.executable, "-m", "logitless.cli.main", "serve-tinker", folder, "--port", "0", "--name", "model"]
        command += ["--folder", f"{folder}/saved", "--tokens-per-row", "32768", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                yield server.stdout.readline().strip(), Path(folder, "saved")
            finally:
                server.kill()


def measured(model: str, workload: str) -> dict[str, Any]:
    """Of the service and, on a GPU, of a block of `logitless train`."""
    import torch

    from bits_cases import MODELS as SHAPES
    from logitless.bench.machine import environment
    from rollout_contenders import block
    from rollout_workloads import Workload

    work = Workload.parse(workload)
    vocabulary = SHAPES[model]["vocab_size"] if torch.cuda.is_available() else TINY["vocab_size"]
    prompts = work.prompt_ids(int(vocabulary))  # as of the block
    found: dict[str, Any] = {
        **environment("cuda" if torch.cuda.is_available() else "cpu", ("torch", "triton", "tinker")),
        "model": model,
        "workload": workload,
    }
    with served(model) as (url, _):
        found["service"] = cycles(url, prompts=prompts, samples=work.samples, new_tokens=work.most, rank=16)
        found["small"] = cycles(url, prompts=[prompts[0][:16]], samples=4, new_tokens=32, rank=16)
    if torch.cuda.is_available():
        train = block(f"{model}-lora", "gpu", work)
        seconds = sum(value for name, value in train.items() if name.endswith("_seconds"))
        found["train"] = {**train, "seconds": seconds, "tokens_per_second": round(train["tokens"] / seconds)}
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model and workload."""
    parser.add_argument("--model", default="qwen2.5-0.5b", help="of rollout.py, without -lora")
    parser.add_argument("--workload", default="64x8-512-128", help="prompts x samples - prompt tokens - new tokens")
    parser.add_argument("--out", type=Path, help="a file for the JSON, beside printing it")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    os.environ.setdefault("TINKER_API_KEY", "tml-local")
    return shown(measured(options.model, options.workload), options.out)


def shown(found: dict[str, Any], out: Path | None) -> int:
    """Print results, and write them to the file that is given; 0, the exit status."""
    text = json.dumps(found, indent=1)
    print(text)
    if out is not None:
        out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    parser = command_line(__doc__)
    add_arguments(parser)
    raise SystemExit(run(parser.parse_args()))
