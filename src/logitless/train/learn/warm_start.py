"""Warm start: supervised training on given answers before the first rollout, through the same head."""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from logitless.data.packing import Packing, pack, plan_epoch
from logitless.data.prompts import PromptOrder
from logitless.errors import TrainingError
from logitless.models.seeded import seeded
from logitless.rollout.recorded import text_of_column
from logitless.seeds import derived_seed
from logitless.train.learn.policy import Policy
from logitless.train.optim.optimizer import adamw, learning_rate, take_step
from logitless.train.recipe.data import WarmStartSection
from logitless.train.recipe.training import OptimizerSection, TrainSection
from logitless.types import Prompt


def warm_start(
    policy: Policy,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    options: WarmStartSection,
    train: TrainSection,
    *,
    seed: int,
    tell: Callable[[str], None],
) -> None:
    """Train the policy on the answers of a column, with an AdamW that is discarded afterwards; in place.

    ``loss = -mean over the answers' tokens of logp`` at temperature 1.

    Args:
        tokenizer: tokenizes answers, without special tokens; its EOS ends them.
        train: gives ``tokens_per_micro_batch``, gradient norm and head backend.
        tell: called with a line about the loss, ten times.

    Raises:
        DataError: a prompt has no text in the answer column.
        TrainingError: a gradient is not finite.
    """
    pairs = [(prompt, text_of_column(prompt, options.answer_column, tokenizer)) for prompt in prompts]
    data = pack(pairs)
    schedule = OptimizerSection(learning_rate=options.learning_rate, schedule=options.schedule)
    optimizer = adamw(policy.model.parameters(), schedule, policy.device)
    order = PromptOrder(len(pairs), derived_seed(seed, "warm_start"))
    for step in range(options.steps):
        batch = data.take(order.next(options.sequences_per_step))
        [plan] = plan_epoch(
            [range(batch.num_sequences)],
            batch.inputs,
            tokens_per_step=batch.num_tokens,
            packing=Packing(train.tokens_per_micro_batch, share_prompts=False),
            seed=0,
        )
        loss = 0.0
        with seeded(derived_seed(seed, "warm_start", "dropout", step), policy.device):  # of LoRA
            for sequences in plan.micro_batches:
                scores = policy.scores(batch.take(sequences), temperature=1.0, backend=train.training_backend)
                part = -scores.logp.sum() / batch.num_tokens
                part.backward()  # type: ignore[no-untyped-call]
                loss += float(part.detach())
        rate = learning_rate(step, step / options.steps, schedule)
        _, finite = take_step(optimizer, rate=rate, max_grad_norm=train.max_grad_norm)
        if not finite:
            raise TrainingError(
                needed="finite gradients in the warm start",
                given=f"a gradient that is not finite at step {step}",
                remedy="Lower warm_start.learning_rate.",
            )
        if (step + 1) % max(1, options.steps // 10) == 0:
            tell(f"warm start {step + 1}/{options.steps}: loss {loss:.4f} nat a token")
