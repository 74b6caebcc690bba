"""Contenders of ``benchmarks/rollout.py``. Every sample has a forced length."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from bits_measured import build
from logitless.bench.machine import release
from logitless.data.packing import pack
from logitless.distributed.arrangement import Arrangement
from logitless.distributed.ranks import Ranks
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.lm_head import backbone, causal_lm
from logitless.models.lora import LoraOptions, add_lora
from logitless.models.modes import evaluating
from logitless.models.row_invariant.layers import install_row_invariant
from logitless.rewards.reward import weighted
from logitless.rollout.engine import Engine, is_exact
from logitless.rollout.gpu.engine import GpuEngine
from logitless.rollout.gpu.steps import Log, Steps
from logitless.rollout.gpu.token_sampling import key_of
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.transformers import TransformersEngine, _Batch
from logitless.train.assembly.algorithm import algorithm_of
from logitless.train.assembly.stages import learner_of
from logitless.train.block import pack_groups
from logitless.train.learn.policy import Policy
from logitless.train.learn.score import mismatched, sampled_scores
from logitless.train.optim.master_weights import lower_to
from logitless.train.recipe.loading import parse_recipe
from logitless.types import Completion, Group, Prompt, TokenScores, Verdict
from rollout_routes import Routes, routes_of
from rollout_workloads import Cost, Workload

_LORA = "-lora"
TOKENS_PER_MICRO_BATCH = 16384
"""Of a measured block."""


class Subject:
    """A model with random weights that is sampled from.

    Args:
        name: of ``rollout.py``.
        dtype: of its weights.
    """

    def __init__(self, name: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.model: nn.Module = build(name.removesuffix(_LORA), dtype)
        if name.endswith(_LORA):
            self.model = add_lora(self.model, LoraOptions(rank=16))
            with torch.no_grad():
                for parameter_name, parameter in self.model.named_parameters():
                    if "lora_B" in parameter_name:
                        parameter.normal_(0, 0.01)
            lower_to(dtype, (p for p in self.model.parameters() if p.requires_grad))
        self.vocabulary = int(causal_lm(self.model).config.vocab_size)

    @cached_property
    def cost(self) -> Cost:
        """Of a step."""
        decoder: Any = backbone(self.model)
        config = decoder.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        tied = config.tie_word_embeddings
        parameters = sum(p.numel() for p in self.model.parameters())
        return Cost(
            parameters if tied else parameters - decoder.embed_tokens.weight.numel(),
            4 * config.num_hidden_layers * config.num_key_value_heads * width,
        )


class Contender(Protocol):
    """Samples a workload again and again."""

    def sample(self) -> int:
        """New tokens of one pass."""
        ...

    def waited(self) -> float:
        """Seconds of the last pass in which the host waited for the device, where they are counted."""
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...


class _OfEngine:
    """An engine of this library."""

    def __init__(self, engine: Engine, subject: Subject, work: Workload) -> None:
        self.engine, self.work = engine, work
        self.prompts = [Prompt(str(p), "", ids) for p, ids in enumerate(work.prompt_ids(subject.vocabulary))]

    def completions(self, options: SamplingOptions) -> list[list[Completion]]:
        return self.engine.sample(self.prompts, self.work.samples, options, seed=0)

    def sample(self) -> int:
        if isinstance(self.engine, ForcedGpu):
            self.engine.waited = 0.0
        groups = self.completions(SamplingOptions(max_new_tokens=self.work.most, stop=(NEVER,)[: self.stops]))
        return sum(completion.length for group in groups for completion in group)

    stops = 0

    def waited(self) -> float:
        return getattr(self.engine, "waited", 0.0)

    def close(self) -> None:
        self.engine.close()


NEVER = "\0 no text has this \0"


class ForcedGpu(GpuEngine):
    """Counts the seconds in which the host waits for the device, which is how far it is ahead of it."""

    work: Workload
    waited = 0.0
    routes: Routes | None = None

    def _steps_for(self, max_rows: int, max_pages: int, group_size: int) -> Steps:
        steps = super()._steps_for(max_rows, max_pages, group_size)
        if "run" not in vars(steps):
            if self.routes is not None:
                self.routes.watch(steps)
            steps.run = partial(self._run, steps.run)  # type: ignore[method-assign]
        return steps

    def _run(self, run: Callable[..., Callable[[], Log]], *arguments: Any) -> Callable[[], Log]:
        wait = run(*arguments)

        def timed() -> Log:
            start = time.perf_counter()
            log = wait()
            self.waited += time.perf_counter() - start
            return log

        return timed

    def _limit(self, prompt: Prompt, sample: int, options: SamplingOptions) -> int:  # noqa: ARG002
        return self.work.lengths[int(prompt.id)][sample]


class ForcedTransformers(TransformersEngine):
    """Ends rows where it would look for a stop string."""

    work: Workload

    def _decode(self, prompts: Any, rows: Any, options: SamplingOptions, seed: int) -> list[Completion]:
        lengths = [self.work.lengths[int(prompts[p].id)][g] for p, g in rows]
        self._lengths = torch.tensor(lengths, device=next(self._model.parameters()).device)
        return super()._decode(prompts, rows, options, seed)

    def _stop_string_came(self, tokens: Tensor, step: int, batch: _Batch, stop: Sequence[str]) -> Tensor:  # noqa: ARG002
        return self._lengths[batch.row] <= step + 1


def _gpu(subject: Subject, work: Workload) -> Contender:
    engine = ForcedGpu(subject.model, character_tokenizer("abcdefgh"), max_rows=2048)
    engine.work = work
    return _OfEngine(engine, subject, work)


class _Transformers(_OfEngine):
    stops = 1


def _transformers(subject: Subject, work: Workload) -> Contender:
    engine = ForcedTransformers(subject.model, character_tokenizer("abcdefgh"))
    engine.work = work
    return _Transformers(engine, subject, work)


class _Generate:
    """``model.generate`` with a static cache, prompts repeated for their samples; it waits for the longest."""

    def __init__(self, subject: Subject, work: Workload) -> None:
        self.model: Any = causal_lm(subject.model)
        self.before = self.model.config._attn_implementation
        self.model.set_attn_implementation("sdpa")
        ids = torch.tensor(work.prompt_ids(subject.vocabulary), device=self.model.device)
        self.ids, self.work = ids.repeat_interleave(work.samples, 0), work
        self.lengths = torch.tensor([n for group in work.lengths for n in group], device=self.model.device)

    def sample(self) -> int:
        start, lengths = self.work.prompt_tokens, self.lengths

        class Ended(StoppingCriteria):
            def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:  # noqa: ARG002
                return lengths <= input_ids.shape[1] - start

        settings = GenerationConfig(
            do_sample=True, max_new_tokens=self.work.most, top_k=0, pad_token_id=0, cache_implementation="static",
            disable_compile=True,
        )  # fmt: skip
        with torch.no_grad(), evaluating(self.model):
            self.model.generate(
                self.ids, attention_mask=torch.ones_like(self.ids), generation_config=settings,
                stopping_criteria=StoppingCriteriaList([Ended()]),
            )  # fmt: skip
        return self.work.tokens

    def waited(self) -> float:
        return 0.0

    def close(self) -> None:
        self.model.set_attn_implementation(self.before)
        self.model._cache = None


CONTENDERS: Mapping[str, Callable[[Subject, Workload], Contender]] = {
    "gpu": _gpu,
    "transformers": _transformers,
    "generate": _Generate,
}
_REPEATED = ("gpu",)
_ENOUGH = 4.0
"""Seconds of passes after which there is no third."""


def measured(name: str, subject: Subject, work: Workload) -> dict[str, Any]:
    """Tokens, the seconds of the first pass and of the best of those after it, and the most memory in use."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    contender = CONTENDERS[name](subject, work)
    seconds: list[float] = []
    waited: list[float] = []
    with MemoryWatch() as memory:
        while len(seconds) < (3 if name in _REPEATED and sum(seconds[1:]) < _ENOUGH else 2 if name in _REPEATED else 1):
            tokens = contender.sample()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            waited.append(contender.waited())
            start = time.perf_counter()
    contender.close()
    release("cuda")
    again = seconds[1:] or seconds
    host = seconds[seconds.index(min(again))] - waited[seconds.index(min(again))]
    return {
        "tokens": tokens,
        "seconds": min(again),
        "first_seconds": seconds[0],
        **({"host_seconds": host} if name == "gpu" else {}),
        "tokens_per_second": tokens / min(again),
        "peak_bytes": memory.most,
    }


class MemoryWatch:
    """The most memory of the device in use by any allocator, sampled every few milliseconds."""

    def __init__(self) -> None:
        self.most = 0

    def __enter__(self) -> "MemoryWatch":
        import threading

        self._over, device = threading.Event(), torch.cuda.current_device()

        def look() -> None:
            while not self._over.wait(0.02):
                free, total = torch.cuda.mem_get_info(device)
                self.most = max(self.most, total - free)

        self._thread = threading.Thread(target=look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def block(name: str, engine_name: str, work: Workload) -> dict[str, Any]:
    """Seconds of the phases of a block: the second of two, the first of which compiles and captures."""
    lora = name.endswith(_LORA)
    subject = Subject(name, torch.bfloat16 if lora else torch.float32)
    if not lora:
        lower_to(torch.bfloat16, subject.model.requires_grad_(True).parameters())
    model = subject.model.train()
    if engine_name == "gpu":
        install_row_invariant(model)
    recipe = parse_recipe(block_recipe(work, lora=lora, gpu=engine_name == "gpu"))
    algorithm, rewards = algorithm_of(recipe), weighted(recipe.rewards)
    learner, _ = learner_of(recipe, algorithm, model, Arrangement(), Ranks.alone(), rewards=rewards)
    contender = CONTENDERS[engine_name](subject, work)
    assert isinstance(contender, _OfEngine)
    options = SamplingOptions(max_new_tokens=work.most, stop=(NEVER,)[: contender.stops])
    for _ in range(2):
        marks = [_now()]
        contender.engine.load(learner.weights(), learner.version)
        completions = contender.completions(options)
        marks.append(_now())
        groups = [_judged(prompt, each) for prompt, each in zip(contender.prompts, completions, strict=True)]
        packed = pack_groups(groups)
        marks.append(_now())
        sampled: TokenScores | None = sampled_scores(groups, options, learner.version, exact=is_exact(contender.engine))
        scored = learner.score(packed, groups, sampled)
        marks.append(_now())
        learner.begin(scored)
        while learner.in_training:
            learner.step()
        marks.append(_now())
    phases = [b - a for a, b in pairwise(marks)]
    contender.close()
    return {
        "rollout_seconds": phases[0],
        "packing_seconds": phases[1],
        "scoring_seconds": phases[2],
        "training_seconds": phases[3],
        "tokens": packed.packed.num_tokens,
        "optimizer_steps": learner.version // 2,
    }


def law(name: str, work: Workload, num_tokens: int) -> Iterator[dict[str, Any]]:
    """After each block: tokens so far, and those with other bits than training's; weights change between blocks.

    Of a mixture also its routes, one for each token and layer with a router, and those with other experts.
    """
    subject = Subject(name)
    contender = CONTENDERS["gpu"](subject, work)
    assert isinstance(contender, _OfEngine)
    assert isinstance(contender.engine, ForcedGpu)
    policy, options = Policy(subject.model), SamplingOptions(max_new_tokens=work.most, temperature=0.9)
    routes = contender.engine.routes = None if policy.routers is None else Routes(policy.routers)
    trained = [p for n, p in subject.model.named_parameters() if "lora" in n or not name.endswith(_LORA)]
    found = {"tokens": 0, "blocks": 0, "mismatched_tokens": 0}
    if routes is not None:
        found |= {"routes": 0, "mismatched_routes": 0}
    while found["tokens"] < num_tokens:
        seed = found["blocks"]
        groups = contender.engine.sample(contender.prompts, work.samples, options, seed=seed)
        pairs = [(p, c) for p, group in zip(contender.prompts, groups, strict=True) for c in group]
        keys = [key_of(seed, p.id, sample) for p in contender.prompts for sample in range(work.samples)]
        for start in range(0, len(pairs), 24):
            part, batch = pairs[start : start + 24], pack(pairs[start : start + 24])
            reading = nullcontext([]) if routes is None else routes.routers.read()
            with torch.no_grad(), reading as choices:
                scored = policy.scores(batch, temperature=0.9, backend="fused")
            sampled = TokenScores(*(_together(part, name) for name in ("logp_sampler", "entropy_sampler")))
            found["mismatched_tokens"] += mismatched(sampled, TokenScores(scored.logp.cpu(), scored.entropy.cpu()))
            found["tokens"] += len(sampled.logp)
            if routes is not None:
                packed = routes_of(choices, policy._read(batch).source)
                decoded = torch.cat([routes.of(key) for key in keys[start : start + 24]])
                found["routes"] += packed[..., 0].numel()
                found["mismatched_routes"] += int((decoded != packed).any(-1).sum())
        found["blocks"] += 1
        with torch.no_grad():
            for parameter in trained:
                parameter.mul_(1 + 0.01 * torch.randn_like(parameter))
        contender.engine.load(policy.weights(), found["blocks"])
        yield dict(found)
    contender.close()


def _together(completions: Sequence[tuple[Prompt, Completion]], name: str) -> Tensor:
    """An array of the completions, [N] float32 over their tokens."""
    return torch.from_numpy(np.concatenate([getattr(completion, name) for _, completion in completions])).float()


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def _judged(prompt: Prompt, completions: Sequence[Completion]) -> Group:
    """Every other completion is right."""
    rewards = tuple(float(i % 2) for i in range(len(completions)))
    return Group(prompt, tuple(completions), tuple({"length": Verdict.graded(reward)} for reward in rewards), rewards)


def block_recipe(work: Workload, *, lora: bool, gpu: bool, ranks: int = 1) -> dict[str, Any]:
    """Of a block; its model is not read.

    Args:
        work: of all ranks.
        lora: whether an adapter alone is trained.
        gpu: whether sampling has the bits of training.
        ranks: with prompts of their own; each reads as many tokens in a step as one alone.
    """
    return {
        "name": "block",
        "model": {
            "source": {"model_type": "llama"},
            "random_weights": True,
            "dtype": "bfloat16" if lora else "float32",
            "trained_dtype": "bfloat16",
            "layers": "row_invariant" if gpu else "transformers",
            "lora": {} if lora else None,
        },
        "data": {"train": {"name": "file", "path": "none.jsonl"}, "max_prompt_tokens": work.prompt_tokens},
        "rollout": {
            "engine": {"name": "gpu" if gpu else "transformers"},
            "prompts_per_block": work.prompts,
            "completions_per_prompt": work.samples,
            "sampling": {"max_new_tokens": work.most},
        },
        "rewards": [{"name": "length"}],
        "train": {"tokens_per_step": 65536 * ranks, "tokens_per_micro_batch": TOKENS_PER_MICRO_BATCH},
    }
