"""Who is measured by ``logitless bench step``: one model, one optimizer, one set of rollouts, several trainers.

Every contender computes the loss of the same sequences (DAPO's, the default of TRL) and leaves the gradient in the same
parameters. ``step_rows`` steps this library's ``Learner`` and TRL's trainer; on single sequences of growing length
three heads are compared inside this library's packing and objective. TRL's trainer is the installed one, called
micro-batch by micro-batch on the padded tensors that it would have made of the rollouts.
"""

import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from logitless.data.packing import StepPlan, pack, plan_epoch
from logitless.errors import UnavailableError
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.lm_head import backbone_hidden
from logitless.models.lora import LoraOptions, add_lora
from logitless.models.packed import PACKED
from logitless.models.seeded import seeded
from logitless.objective.advantage import AdvantageInputs
from logitless.objective.inputs import required
from logitless.objective.presets import trl as trl_preset
from logitless.train.config import Backend
from logitless.train.policy import Policy
from logitless.train.score import scores_of
from logitless.train.step import MicroBatch, backward, step_batch, step_metrics
from logitless.types import Completion, PackedBatch, Prompt, TokenBatch, TokenScores

ALGORITHM = trl_preset()
STALENESS = 0.05
"""Standard deviation, in nats, of the sampler's log-probabilities around the trained model's."""


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
        fields = dict(self.config)
        dtype = torch.float32 if self.lora_rank is None else torch.bfloat16
        with seeded(0, device), torch.device(device):
            config = AutoConfig.for_model(fields.pop("model_type"), **fields)
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=PACKED)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
        if self.lora_rank is not None:
            model = add_lora(model, LoraOptions(rank=self.lora_rank))
        return model.train()


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


@dataclass(frozen=True)
class Rollouts:
    """Recorded sequences with their advantages, in the trainer's form.

    Args:
        packed: their tokens.
        advantages: one a sequence.
        logp_old: of the sampler, once ``recorded``.
        groups: the sequences of each prompt.
        workload: that they were drawn for.
    """

    packed: PackedBatch
    advantages: Tensor
    groups: tuple[tuple[int, ...], ...]
    workload: Workload
    logp_old: Tensor | None = None

    @classmethod
    def draw(cls, workload: Workload, vocabulary: int) -> "Rollouts":
        """Random tokens; each completion is right or wrong, every group has both, and advantages are TRL's.

        Example:
            >>> Rollouts.draw(Workload(prompts=1, prompt_tokens=4, completion_tokens=16), 41).packed.num_sequences
            8
        """
        chance = random.Random(0)
        quarter, longest, size = (
            workload.prompt_tokens // 4,
            workload.completion_tokens,
            workload.completions_per_prompt,
        )
        pairs: list[tuple[Prompt, Completion]] = []
        rewards: list[float] = []
        for p in range(workload.prompts):
            length = workload.prompt_tokens + chance.randint(-quarter, quarter)
            prompt = Prompt(str(p), "", tuple(chance.randrange(vocabulary) for _ in range(length)))
            right = chance.randint(1, size - 1)
            for c in range(size):
                length = chance.randint(workload.shortest, longest)
                pairs.append((prompt, _completion(prompt, length, vocabulary, chance)))
                rewards.append(float(c < right))
        group = torch.arange(workload.prompts).repeat_interleave(size)
        assert ALGORITHM.advantage is not None
        inputs = AdvantageInputs(torch.tensor(rewards), group, sequence=torch.arange(len(group)))
        groups = tuple(tuple(range(p * size, (p + 1) * size)) for p in range(workload.prompts))
        return cls(pack(pairs), ALGORITHM.advantage(inputs).advantage, groups, workload)

    @classmethod
    def single(cls, completion_tokens: int, workload: Workload, vocabulary: int) -> "Rollouts":
        """One sequence of this many completion tokens in a micro-batch of its own, with advantage 1.

        Example:
            >>> Rollouts.single(100, Workload(prompt_tokens=4), 41).packed.num_tokens
            100
        """
        chance = random.Random(0)
        prompt = Prompt("0", "", tuple(chance.randrange(vocabulary) for _ in range(workload.prompt_tokens)))
        pairs = [(prompt, _completion(prompt, completion_tokens, vocabulary, chance))]
        workload = replace(workload, tokens_per_micro_batch=workload.prompt_tokens + completion_tokens)
        return cls(pack(pairs), torch.ones(1), ((0,),), workload)

    def with_live(self, live: float) -> "Rollouts":
        """Only this fraction of the groups has an advantage; the others, evenly spread, were all right or all wrong.

        Example:
            >>> rollouts = Rollouts.draw(Workload(prompts=4, prompt_tokens=4, completion_tokens=16), 41).with_live(0.5)
            >>> [bool(rollouts.advantages[list(group)].any()) for group in rollouts.groups]
            [True, False, True, False]
        """
        advantages = self.advantages.clone()
        for number, group in enumerate(self.groups):
            if int((number + 1) * live + 0.5) == int(number * live + 0.5):
                advantages[list(group)] = 0.0
        return replace(self, advantages=advantages)

    @property
    def live_sequences(self) -> list[int]:
        """Those with an advantage."""
        return [s for s in range(self.packed.num_sequences) if self.advantages[s] != 0]

    @property
    def plan(self) -> StepPlan:
        """One step over everything."""
        size, total = self.workload.tokens_per_micro_batch, self.packed.num_tokens
        steps = plan_epoch(self.groups, self.packed.inputs, tokens_per_step=total, tokens_per_micro_batch=size, seed=0)
        return steps[0]

    @property
    def num_tokens(self) -> int:
        """Tokens that the backbone reads, prompts included and padding not."""
        return len(self.packed.inputs.input_ids)

    @property
    def tokens(self) -> TokenBatch:
        """What the objective reads; the step sets the weights."""
        sequence = self.packed.sequence
        return TokenBatch(
            sequence,
            self.packed.num_sequences,
            advantage=self.advantages[sequence],
            token_weight=torch.ones(len(sequence)),
            logp_old=self.logp_old,
        )

    def recorded(self, policy: Policy) -> "Rollouts":
        """With log-probabilities of a sampler that lagged a little: the policy's own and seeded noise."""
        micro_batches = self.plan.micro_batches
        return self.with_old(scores_of(policy, self.packed, micro_batches, temperature=1.0, backend="auto").logp)

    def with_old(self, logp: Tensor) -> "Rollouts":
        """The same from the policy's log-probs [N]."""
        noise = STALENESS * torch.randn(len(logp), generator=torch.Generator().manual_seed(1))
        return replace(self, logp_old=logp + noise)


def _completion(prompt: Prompt, length: int, vocabulary: int, chance: random.Random) -> Completion:
    return Completion(prompt.id, tuple(chance.randrange(vocabulary) for _ in range(length)), "", "stop")


class Trainer(Protocol):
    """Whatever leaves the gradient of a step's loss in the parameters."""

    def load(self, rollouts: Rollouts) -> None:
        """What is trained on from now on."""
        ...

    def gradients(self) -> float:
        """One forward and backward over everything loaded; the loss."""
        ...


class FullLogits(Policy):
    """Scores as an ordinary trainer does: logits [N, V], their log-softmax in float32, and autograd.

    No entropy is taken, which such a trainer needs another [N, V] for: the figure here is in its favour.
    """

    def scores(self, batch: PackedBatch, *, temperature: float, backend: Backend) -> TokenScores:  # noqa: ARG002
        """logp [N]; the entropy is 0."""
        batch = batch.to(self.device)
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            hidden = backbone_hidden(self.model, batch.inputs)
            rows = hidden.index_select(0, batch.inputs.source) / temperature
            logp = F.log_softmax(F.linear(rows, self.head().weight).float(), dim=-1)
        logp = logp.gather(1, batch.target[:, None]).squeeze(1)
        return TokenScores(logp=logp, entropy=torch.zeros_like(logp))


class Packed:
    """The trainer of this library around a policy.

    Args:
        policy: which scores through one head or another.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._micro_batches: list[MicroBatch] = []

    def load(self, rollouts: Rollouts) -> None:
        """Plan the step and weigh its tokens."""
        self._micro_batches = step_batch(
            rollouts.packed,
            rollouts.tokens,
            rollouts.plan,
            ALGORITHM.objective,
            ALGORITHM.weighting,
            dropped=[False] * rollouts.packed.num_sequences,
            num_steps=1,
            statistics=None,
        )

    def gradients(self) -> float:
        """As the training loop does it, its diagnostics included."""
        outputs = backward(
            self.policy,
            ALGORITHM.objective,
            self._micro_batches,
            temperature=1.0,
            backend="auto",
            beta=0.0,
            entropy_coefficient=None,
            statistics=None,
            seed=0,
        )
        return step_metrics(outputs)["loss/total"]


class InstalledTRL:
    """TRL's ``GRPOTrainer``, as installed, on recorded completions.

    ``training_step`` is TRL's own, with its loss, its head, its metrics and its autocast; only ``_prepare_inputs``,
    which would generate, hands out what was recorded: prompts padded on the left, completions on the right, both to
    the longest of the generation batch, as TRL pads them.

    Args:
        model: the model to train, on its device, gradient checkpointing on.
        optimizer: handed to the trainer; the caller steps it.
        workload: for the sizes of TRL's configuration.
        autocast: whether products are in bfloat16.
        recomputation: TRL's default; the caller sets the model's own to the same.

    Raises:
        UnavailableError: no TRL, or not one that can be imported.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        workload: Workload,
        *,
        autocast: bool,
        recomputation: bool = True,
    ) -> None:
        try:
            import trl
            from datasets import Dataset
        except ImportError as error:
            raise UnavailableError(
                needed="TRL to compare with", given=str(error), remedy="pip install 'logitless[trl]'."
            ) from error

        class Recorded(trl.GRPOTrainer):
            def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
                return inputs

        size = workload.sequences_per_micro_batch
        steps = max(1, workload.prompts * workload.completions_per_prompt // size)
        with tempfile.TemporaryDirectory() as folder:  # nothing is ever written to it
            arguments = trl.GRPOConfig(
                folder,
                use_cpu=next(model.parameters()).device.type == "cpu",
                bf16=autocast,
                gradient_checkpointing=recomputation,
                gradient_checkpointing_kwargs={"use_reentrant": False},
                per_device_train_batch_size=size,
                gradient_accumulation_steps=steps,
                num_generations=workload.completions_per_prompt,
                max_completion_length=workload.completion_tokens,
                report_to="none",
                disable_tqdm=True,
            )
            self._trainer = Recorded(
                model,
                reward_funcs=lambda **_: [],
                args=arguments,
                train_dataset=Dataset.from_dict({"prompt": ["a"] * steps * size}),
                processing_class=character_tokenizer("a"),
                optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
            )
        self._trainer.current_gradient_accumulation_steps = steps
        self._model = self._trainer.accelerator.prepare_model(model)
        self._size = size
        self._micro_batches: list[dict[str, Tensor]] = []

    def load(self, rollouts: Rollouts) -> None:
        """Pad the generation batch and cut it into micro-batches."""
        from trl.trainer.utils import split_tensor_dict

        device = self._trainer.accelerator.device
        generation_batch = {name: values.to(device) for name, values in _padded(rollouts).items()}
        parts = max(1, rollouts.packed.num_sequences // self._size)
        self._micro_batches = split_tensor_dict(generation_batch, parts)
        for batch in self._micro_batches:
            batch["num_items_in_batch"] = generation_batch["completion_mask"].sum()

    def gradients(self, most: int | None = None) -> float:
        """TRL's ``training_step`` on each micro-batch, or on so many at most."""
        losses = [self._trainer.training_step(self._model, batch, None) for batch in self._micro_batches[:most]]
        return float(torch.stack(losses).sum())


def _padded(rollouts: Rollouts) -> dict[str, Tensor]:
    """What ``GRPOTrainer._generate_and_score_completions`` makes of these sequences."""
    inputs = rollouts.packed.inputs
    lengths, counts = list(inputs.lengths), list(inputs.source_counts)
    read = torch.split(inputs.input_ids, lengths)
    prompts = [ids[: n - count + 1] for ids, n, count in zip(read, lengths, counts, strict=True)]
    completions = torch.split(rollouts.packed.target, counts)

    def left(rows: Sequence[Tensor]) -> Tensor:
        return pad_sequence([row.flip(0) for row in rows], batch_first=True).flip(1)

    def right(rows: Sequence[Tensor]) -> Tensor:
        return pad_sequence(list(rows), batch_first=True)

    return {
        "prompt_ids": left(prompts),
        "prompt_mask": left([torch.ones_like(row) for row in prompts]),
        "completion_ids": right(completions),
        "completion_mask": right([torch.ones_like(row) for row in completions]),
        "advantages": rollouts.advantages,
        "old_per_token_logps": right(torch.split(required(rollouts.logp_old, "logp_old"), counts)),
    }


CONTENDERS = ("full-logits", "logitless", "logitless-budget-0", "trl")


def trainer(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, workload: Workload, autocast: torch.dtype | None
) -> Trainer:
    """The contender of this name around a model.

    Raises:
        UnavailableError: TRL, where it is not installed.
    """
    if name == "trl":
        return InstalledTRL(model, optimizer, workload, autocast=autocast is not None)
    if name == "full-logits":
        return Packed(FullLogits(model, autocast=autocast))
    return Packed(Policy(model, autocast=autocast, memory_budget=0 if name == "logitless-budget-0" else None))
