"""Contenders of ``benchmarks/step.py``: one model, one optimizer, one set of rollouts, several trainers.

Every contender computes the loss of the same sequences (DAPO's, the default of TRL) and leaves the gradient in the same
parameters. ``step_rows`` steps this library's ``Learner`` and TRL's trainer; on single sequences of growing length
three heads are compared inside this library's packing and objective. TRL's trainer is the installed one, called
micro-batch by micro-batch on the padded tensors that it would have made of the rollouts.
"""

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from logitless.data.packing import Packing, StepPlan, pack, plan_epoch
from logitless.errors import UnavailableError
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.lm_head import backbone_hidden
from logitless.objective.advantage import AdvantageInputs
from logitless.objective.inputs import required
from logitless.objective.presets import trl as trl_preset
from logitless.train.learn.policy import Policy
from logitless.train.learn.score import scores_of
from logitless.train.learn.step import MicroBatch, OptimizerStep, backward, on_host, step_numbers
from logitless.types import Completion, PackedBatch, Prompt, TokenBatch, TokenScores
from shapes import Workload

ALGORITHM = trl_preset()
STALENESS = 0.05
"""Standard deviation, in nats, of the sampler's log-probabilities around the trained model's."""


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
        packing = Packing(self.workload.tokens_per_micro_batch, share_prompts=False)
        total = self.packed.num_tokens
        return plan_epoch(self.groups, self.packed.inputs, tokens_per_step=total, packing=packing, seed=0)[0]

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

    def scores(self, batch: PackedBatch, *, temperature: float, **_: Any) -> TokenScores:
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
        step = OptimizerStep(
            rollouts.packed,
            rollouts.tokens,
            rollouts.plan,
            ALGORITHM.objective,
            ALGORITHM.weighting,
            dropped=[False] * rollouts.packed.num_sequences,
        )
        self._micro_batches = step.micro_batches()

    def gradients(self) -> float:
        """As the training loop does it, its diagnostics included."""
        outputs = backward(
            self.policy,
            ALGORITHM.objective,
            self._micro_batches,
            temperature=1.0,
            backend="auto",
            seed=0,
        )
        return on_host(step_numbers(outputs))["loss/total"]


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
