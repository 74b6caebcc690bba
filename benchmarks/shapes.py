"""Models with random weights that the scripts train and sample from, and the workloads of a training step."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from logitless.models.lora import LoraOptions, add_lora
from logitless.models.packed import PACKED
from logitless.models.seeded import seeded


@dataclass(frozen=True)
class Shape:
    """A model that is trained.

    Args:
        name: of the result file.
        title: for people.
        config: of transformers.
        lora_rank: of adapters on every linear layer over a frozen bfloat16 base; None trains every weight in float32.
    """

    name: str
    title: str
    config: Mapping[str, Any] = field(repr=False)
    lora_rank: int | None = None

    @property
    def file(self) -> str:
        return f"step-{self.name}.json"

    def workload(self, name: str) -> "Workload":
        """One of ``WORKLOADS``, shrunk for the model to try the tool with."""
        return WORKLOADS[name].shrunk(64) if self is TINY else WORKLOADS[name]

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])

    def build(self, device: str) -> nn.Module:
        """The model with random weights, made on the device; activations are recomputed in the backward."""
        dtype = torch.float32 if self.lora_rank is None else torch.bfloat16
        model: Any = random_model(self.config, dtype, device)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if self.lora_rank is not None:
            model = add_lora(model, LoraOptions(rank=self.lora_rank))
        trained: nn.Module = model.train()
        return trained


def random_model(config: Mapping[str, Any], dtype: torch.dtype, device: str, *, seed: int = 0) -> nn.Module:
    """A model whose weights are drawn on the device, which takes seconds where a CPU takes minutes for 8 billion."""
    fields = dict(config)
    with seeded(seed, device), torch.device(device):
        made = AutoConfig.for_model(fields.pop("model_type"), **fields)
        model: nn.Module = AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation=PACKED)
    return model


TINY = Shape(
    "tiny",
    "a model to try the tool itself",
    {
        "model_type": "llama",
        "vocab_size": 41,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.3,
    },
)
SHAPES = (
    Shape(
        "qwen2.5-0.5b",
        "Qwen2.5-0.5B, every weight",
        {
            "model_type": "qwen2",
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
    ),
    Shape(
        "qwen3-1.7b",
        "Qwen3-1.7B, every weight",
        {
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
    ),
    Shape(
        "llama-3.1-8b-lora",
        "Llama-3.1-8B, LoRA of rank 16",
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
        lora_rank=16,
    ),
    TINY,
)


@dataclass(frozen=True)
class Workload:
    """The rollouts of one step and how they are cut.

    Args:
        prompts, completions_per_prompt: P and G.
        prompt_tokens: mean length of a prompt; lengths spread by a quarter around it.
        completion_tokens: longest completion.
        tokens_per_micro_batch: the most tokens in a packed row.
        sequences_per_micro_batch: TRL's ``per_device_train_batch_size``.
        shortest_completion: lengths are uniform from here to the longest; None: an eighth of that.
    """

    prompts: int = 2
    completions_per_prompt: int = 8
    prompt_tokens: int = 256
    completion_tokens: int = 2048
    tokens_per_micro_batch: int = 16384
    sequences_per_micro_batch: int = 8
    shortest_completion: int | None = None

    @property
    def shortest(self) -> int:
        """Tokens of the shortest completion."""
        return self.completion_tokens // 8 if self.shortest_completion is None else self.shortest_completion

    def shrunk(self, by: int) -> "Workload":
        """The same with shorter prompts and completions, to try the tool itself."""
        return replace(
            self,
            prompt_tokens=max(4, self.prompt_tokens // by),
            completion_tokens=self.completion_tokens // by,
            shortest_completion=max(1, self.shortest // by),
        )


WORKLOADS: Mapping[str, Workload] = {
    "long": Workload(),
    "512/64-256": Workload(8, 8, 512, 256, shortest_completion=64),
    "512/128-1024": Workload(8, 8, 512, 1024, shortest_completion=128),
    "128/512-2048": Workload(8, 8, 128, 2048, shortest_completion=512),
    "2048/128-512": Workload(4, 16, 2048, 512, shortest_completion=128),
}
"""Tokens of a prompt / of the completions; P x G is 2 x 8 for the first, 4 x 16 for the last and 8 x 8 between."""
