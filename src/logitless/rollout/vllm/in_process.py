"""Sampling with vLLM in this process, on the GPU that trains or on the CPU.

All weights reach vLLM through a private folder; it is started with the first ones. With ``sleep`` it frees its memory
while nothing is sampled, which exists on GPUs alone and has **not been run yet**. Log-probs are not bitwise identical
to training's, as of every engine with its own kernels, and the weights are in memory a second time.
"""

import copy
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from logitless.errors import EngineError, UnavailableError
from logitless.models.lm_head import causal_lm
from logitless.rollout.completions import check_prompts, made_completions, stop_ids
from logitless.rollout.engine import Weights
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.vllm.api import Sampled, sampling_fields
from logitless.rollout.vllm.probe import Probe
from logitless.rollout.vllm.weight_folder import WeightFolders, private_folder
from logitless.seeds import derived_seed
from logitless.types import Completion, Prompt

_WORKER = "logitless.rollout.vllm.worker.FolderWeights"


class VllmEngine:
    """An ``Engine`` around ``vllm.LLM``.

    Args:
        tokenizer: decodes completions.
        dtype: of vLLM's weights and products.
        context: tokens of prompt and completion.
        memory_fraction: share of the GPU's memory.
        sleep: free the memory between calls of ``sample``.
        eager: run without CUDA graphs.
        max_rows: completions decoded at once.
        probe: checks log-probs after every load.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        dtype: str,
        context: int,
        memory_fraction: float,
        sleep: bool,
        eager: bool,
        max_rows: int,
        probe: Probe,
    ) -> None:
        self._tokenizer, self._dtype, self._context, self._probe = tokenizer, dtype, context, probe
        self._sleep, self._version = sleep, 0
        self._weights: Weights | None = None
        self._llm: Any = None
        root, self._remove = private_folder(self)
        self._folders = WeightFolders(root, dtype=getattr(torch, dtype))
        self._options = {
            "dtype": dtype,
            "max_model_len": context,
            "gpu_memory_utilization": memory_fraction,
            "enforce_eager": eager,
            "max_num_seqs": max_rows,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": _WORKER,
            "generation_config": "vllm",
            "enable_sleep_mode": sleep,
            "disable_log_stats": True,
        }
        if not torch.cuda.is_available():  # on CPUs vLLM 0.32 fails at chunked prefill of a prompt with a seed
            self._options["enable_chunked_prefill"] = False
        self.transfer_numbers: dict[str, float | int] = {}

    def load(self, weights: Weights, version: int) -> None:
        """Start vLLM with the weights, or have it load them; then probe.

        Raises:
            EngineError: the probe's log-probs differ.
            UnavailableError: vLLM cannot run here.
        """
        start = time.perf_counter()
        inner: Any = causal_lm(weights.module)

        def configure(folder: Path) -> None:
            config = copy.deepcopy(inner.config)
            config.architectures = [type(inner).__name__]  # missing in a config made by hand
            config.save_pretrained(folder)
            self._tokenizer.save_pretrained(str(folder))

        written = self._folders.write(weights.tensors(), version, configure)
        if self._llm is None:
            self._llm = self._started(written.folder)
        else:
            with self._awake():
                self._llm.collective_rpc("load_weight_folder", kwargs={"folder": str(written.folder)})
                if not self._llm.reset_prefix_cache():
                    raise EngineError(
                        needed="a prefix cache without keys of earlier weights",
                        given="one that vLLM did not reset",
                        remedy="Load weights while nothing is being sampled.",
                    )
        self._weights, self._version = weights, version
        pushed = time.perf_counter() - start
        difference = self._probe.within(self._context).check(
            lambda prompt, n, options, seed: self._sampled([(list(prompt), seed)], n, options, ())[0],
            weights.module,
            where="vLLM in this process",
            version=version,
        )
        self.transfer_numbers = {
            "weights/pushed_bytes": written.num_bytes,
            "weights/push_seconds": pushed,
            "weights/probe_difference_max": difference,
        }

    def _started(self, folder: Path) -> Any:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        try:
            from vllm import LLM
        except ImportError as error:
            raise UnavailableError(
                needed="vLLM, for rollout.engine vllm", given=str(error), remedy="Install logitless[vllm]."
            ) from error
        return LLM(model=str(folder), **self._options)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Wake vLLM up, and put it to sleep again afterwards."""
        if not self._sleep:
            yield
            return
        self._llm.wake_up()
        try:
            yield
        finally:
            self._llm.sleep(level=1)

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
    ) -> list[list[Completion]]:
        """Exactly ``num_samples`` completions of each prompt; for ``logp_sampler`` see ``VllmServerEngine.sample``.

        Raises:
            InputError: see ``check_prompts``; or options that vLLM interprets differently.
            EngineError: no weights were loaded, or a completion lacks log-probs.
        """
        if self._weights is None:
            raise EngineError(needed="weights to sample with", given="none yet", remedy="Call load before sample.")
        check_prompts(prompts, num_samples, options, self._context)
        ends = stop_ids(self._tokenizer, self._weights.module, options)
        asked = [(p.token_ids.tolist(), derived_seed(seed, p.id)) for p in prompts]
        groups = self._sampled(asked, num_samples, options, ends)
        greedy = options.temperature == 0
        return [
            made_completions(
                self._tokenizer,
                [prompt.id] * num_samples,
                [each.token_ids for each in group],
                [np.zeros_like(each.logp) if greedy else each.logp for each in group],
                options=options,
                ends=ends,
                version=self._version,
            )
            for prompt, group in zip(prompts, groups, strict=True)
        ]

    def _sampled(
        self, asked: Sequence[tuple[list[int], int]], num_samples: int, options: SamplingOptions, ends: Sequence[int]
    ) -> list[list[Sampled]]:
        from vllm import SamplingParams

        settings = [
            SamplingParams(
                n=num_samples,
                seed=seed,
                max_tokens=options.max_new_tokens,
                stop=list(options.stop),
                stop_token_ids=list(ends),
                logprobs=0,
                **sampling_fields(options),
            )
            for _, seed in asked
        ]
        with self._awake():
            outputs = self._llm.generate([{"prompt_token_ids": ids} for ids, _ in asked], settings, use_tqdm=False)
        return [[_sampled(each) for each in output.outputs] for output in outputs]

    def close(self) -> None:
        """Stop vLLM and remove the folder."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
        self._remove()


def _sampled(output: Any) -> Sampled:
    if output.logprobs is None or output.finish_reason not in ("stop", "length"):
        raise EngineError(
            needed="a finished completion with log-probs from vLLM",
            given=f"one that ended because of {output.finish_reason!r}",
            remedy="Use a version of vLLM that docs/servers.md names.",
        )
    ids = list(output.token_ids)
    logp = [place[token].logprob for token, place in zip(ids, output.logprobs, strict=True)]
    return Sampled(np.array(ids, np.int64), np.array(logp, np.float32), output.finish_reason)
