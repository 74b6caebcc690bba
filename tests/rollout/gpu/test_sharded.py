"""A model whose layers are sharded over the ranks that sample with it: the bits of the whole model on one rank."""

from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from logitless.distributed.ranks import Ranks
from logitless.errors import TrainingError
from logitless.head import fused
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.lm_head import backbone
from logitless.models.loading import load_model
from logitless.models.lora import LoraOptions, add_lora
from logitless.rollout.engine import Weights
from logitless.rollout.gpu import steps
from logitless.rollout.sampling import SamplingOptions
from logitless.types import Prompt
from tests.head.interpreter import complete_interpreter
from tests.models.mixtures import MIXTURES
from tests.models.tiny import CONFIGS
from tests.ranks import DEVICES, run_on_ranks

pytest.importorskip("triton")

SMALL = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 11}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
PROMPTS = [Prompt("a", "", (3, 4, 5)), Prompt("b", "", (6,))]
SHORT, LONG = SamplingOptions(max_new_tokens=1), SamplingOptions(max_new_tokens=3)


def _model(name, dtype, device="cpu", *, empty=False, seed=1):
    config = {**(CONFIGS | MIXTURES)[name], **SMALL} | ({"num_hidden_layers": 3} if name == "qwen3" else {})
    model = load_model(config, random_weights=True, seed=seed, device=device, empty=empty, dtype=dtype)
    if name == "qwen3":
        model = add_lora(model, LoraOptions(rank=2), seed=seed)
        for name, parameter in model.named_parameters():
            if "lora_B" in name and not empty:
                parameter.data.add_(0.1)
    return model.eval()


def _dtype(name, device):
    """Float32, whose kernels of delta nets compile for minutes on a GPU: there they have bfloat16."""
    return torch.bfloat16 if (name, device) == ("qwen3_5", "cuda") else torch.float32


def _engine(name, device):
    from logitless.rollout.gpu.sharded import ShardedGpuEngine

    copy, tokenizer = _model(name, _dtype(name, device), empty=True), character_tokenizer("abcdefgh")
    engine = ShardedGpuEngine(copy, tokenizer, device=torch.device(device, *([dist.get_rank()] * (device == "cuda"))))
    engine.share(Ranks(data=dist.group.WORLD))
    return engine


@contextmanager
def _kernels(device):
    """Inside, a CPU runs them in the interpreter; ranks serve other tests afterwards."""
    if device == "cpu":
        complete_interpreter()
        with mock.patch.object(fused, "why_not", fused._unsupported), mock.patch.object(steps, "STEPS", 1):
            yield
    else:
        yield


def _sampled(rank, name, device, calls):
    with _kernels(device):
        return _sampled_by_both(rank, name, device, calls)


def _sampled_by_both(rank, name, device, calls):
    """What rank r samples in its ``calls[r]``, with two versions of the weights; and alone with all weights.

    In the first call the second layer is short of memory once, in the middle of a pass; in the last it is not finite.
    """
    from logitless.rollout.gpu.engine import GpuEngine

    engine, found, model = _engine(name, device), ([], []), _model(name, _dtype(name, device), device)
    engine.load(Weights.of(model), 0)
    layer = backbone(engine.copy).layers[1]
    plain, short = layer.forward, [True] * (name == "qwen3")  # in the others kernels are compiled by this layer too

    def forward(*arguments, **named):
        if short:
            short.clear()
            raise torch.OutOfMemoryError("in the middle")
        return plain(*arguments, **named)

    layer.forward = forward
    for version in range(2):
        engine.load(Weights.of(model), version)
        with engine.together():
            found[0].extend(engine.sample(*each, seed=0) for each in calls[rank])
        whole = GpuEngine(model, engine.inner.tokenizer)
        whole.load(Weights.of(model), version)
        found[1].extend(whole.sample(*each, seed=0) for each in calls[rank])
        whole.close()
        for parameter in model.parameters():
            parameter.data.mul_(1 + parameter.requires_grad)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "layers.1." in name and p.requires_grad).fill_(torch.nan)
    engine.load(Weights.of(model), 2)
    ends = pytest.raises(TrainingError, match="layer 1 is the first") if calls[rank] else nullcontext()
    with ends, engine.together():  # a pass that looks for the layer is one more that the others join
        for each in calls[rank]:
            engine.sample(*each, seed=0)
    shards = engine.shards
    parts = (part.untyped_storage() for part in (*shards.parameters.values(), *shards._pieces))
    memory = {part.data_ptr(): part for part in parts}.values()
    assert sum(part.nbytes() for part in memory) == shards.num_bytes.total
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_oss", "qwen3_5"))]
)
def test_ranks_with_several_calls_or_none_sample_what_a_rank_with_all_weights_samples(name, device):
    calls = [(PROMPTS[:1], 2, SHORT), (PROMPTS[1:], 1, LONG)], []
    (shared, alone), nothing = run_on_ranks(2, _sampled, name, device, calls, device=device)
    assert shared == alone
    assert shared[0] != shared[2]  # other weights, other completions
    assert nothing == ([], [])
