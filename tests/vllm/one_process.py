"""A process with vLLM in it that serves one tiny model after another; calls are lines of JSON.

A server of its own for each architecture would take half a minute, nearly all of it imports.

    python -m tests.vllm.one_process        # {"call": "open", "folder": ...} in, {"answer": ...} or {"error": ...} out
"""

import gc
import json
import os
import subprocess
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.vllm.api import Sampled
from logitless.rollout.vllm.weight_folder import read_weights
from vllm_process import ENVIRONMENT, ON_CPU


class OneProcess:
    """The process, as the tests see it.

    Args:
        log: file that it writes to.
    """

    def __init__(self, log: Path) -> None:
        root = Path(__file__).parents[2]
        paths = os.pathsep.join(map(str, (root / "src", root, root / "benchmarks")))
        environment = {
            **os.environ,
            **ENVIRONMENT,
            **ON_CPU,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "PYTHONPATH": paths,
        }
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.one_process"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, env=environment, text=True,
            )  # fmt: skip
        self.log = log

    @property
    def alive(self) -> bool:
        """Whether it can be called."""
        return self._process.poll() is None

    def call(self, name: str, **arguments: Any) -> Any:
        """What one of its functions returns.

        Raises:
            RuntimeError: what it raised, or how the process ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"call": name, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM's process ended with {self._process.wait()}: see {self.log}")
        found = json.loads(line)
        if "error" in found:
            raise RuntimeError(found["error"])
        return found["answer"]

    def ask(self, prompt: Sequence[int], count: int, options: SamplingOptions, seed: int) -> list[Sampled]:
        """``Ask`` of a probe."""
        found = self.call(
            "sample", prompt=list(prompt), count=count, tokens=options.max_new_tokens,
            temperature=options.temperature, seed=seed,
        )  # fmt: skip
        return [Sampled(np.array(ids), np.array(logp, np.float32), "length") for ids, logp in found]

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


class _Served:
    """The calls."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._known = set[str]()

    def open(self, folder: str, dtype: str = "float32") -> None:
        from vllm import LLM

        self._begin(folder)
        self._llm = LLM(
            folder,
            dtype=dtype,
            max_model_len=256,
            max_num_seqs=4,
            enforce_eager=True,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            worker_extension_cls="logitless.rollout.vllm.worker.FolderWeights",
        )

    def _begin(self, folder: str) -> None:
        """Leaves the model before, and names the class of the next one."""
        from vllm.distributed import cleanup_dist_env_and_memory

        from vllm import ModelRegistry

        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            gc.collect()
        cleanup_dist_env_and_memory()
        [name] = json.loads((Path(folder) / "config.json").read_text())["architectures"]
        if name not in self._known:  # else vLLM starts a process to look at the class
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
            self._known.add(name)

    def load(self, folder: str) -> Any:
        [found] = self._llm.collective_rpc("load_weight_folder", args=(folder,))
        self._llm.reset_prefix_cache()
        return found

    def sample(self, prompt: list[int], count: int, tokens: int, temperature: float, seed: int) -> Any:
        from vllm import SamplingParams

        options = SamplingParams(
            n=count, max_tokens=tokens, temperature=temperature, logprobs=0, seed=seed, ignore_eos=True
        )
        [found] = self._llm.generate({"prompt_token_ids": prompt}, options, use_tqdm=False)
        return [
            (list(each.token_ids), [of[i].logprob for i, of in zip(each.token_ids, each.logprobs, strict=True)])
            for each in found.outputs
        ]

    def accept(self, folder: str, weights: str) -> tuple[list[str], int]:
        """Of a model that is built and never run: parameters that these weights do not fill, and the size of all."""
        from vllm.config import set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.network_utils import get_open_port

        self._begin(folder)
        config = EngineArgs(folder, dtype="bfloat16", max_model_len=256, enforce_eager=True).create_engine_config()
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
            initialize_model_parallel(1, 1)
            model = initialize_model(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float("nan"))
            model.load_weights(read_weights(weights))
        named = dict(model.named_parameters())
        return [name for name, p in named.items() if p.isnan().any()], sum(p.numel() for p in named.values())


class _Absent(types.ModuleType):
    """A module whose names are there and do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _stand_in() -> None:
    """For what classes of models name as they are imported, and only images or GPUs need.

    torchvision is not installed here, and triton is without a CPU: vLLM puts a placeholder in its place.
    """
    from transformers.utils import is_torchvision_available

    assert not is_torchvision_available()  # which it remembers
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.functional")
    for name in (*names, "torchvision.transforms.v2.functional"):
        sys.modules[name] = _Absent(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    from vllm.triton_utils import triton

    triton.set_allocator = lambda _: None


def main() -> None:
    """Answers until its input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints goes to the log
    _stand_in()
    served = _Served()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            found = {"answer": getattr(served, asked.pop("call"))(**asked)}
        except Exception as error:
            import traceback

            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
