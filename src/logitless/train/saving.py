"""The state of a run as a whole: what its parts hold, into one checkpoint and out of it again."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from logitless.models.value_head import save_value_head
from logitless.train import checkpoint as checkpoints
from logitless.train.collector import Collector
from logitless.train.journal import Journal
from logitless.train.learner import Learner


def save_run(
    collector: Collector,
    learner: Learner,
    journal: Journal,
    tokenizer: PreTrainedTokenizerBase,
    of_loop: Mapping[str, Any],
    *,
    keep: int,
) -> None:
    """Write a checkpoint of everything, under the number of optimizer steps done; see ``checkpoint.py``.

    Args:
        collector, learner, journal: parts of the run.
        tokenizer: saved beside the weights.
        of_loop: what the loop itself has to remember, as JSON.
        keep: checkpoints left afterwards.
    """
    policy = learner.policy
    checkpoints.save_checkpoint(
        journal.folder.checkpoints,
        learner.progress.step,
        save_model=lambda path: policy.save(path, tokenizer),
        save_value_head=None if policy.value_head is None else partial(save_value_head, policy.value_head),
        tensors=learner.tensors() | checkpoints.random_tensors(),
        state={
            **learner.state_dict(),
            "collector": collector.state_dict(),
            "journal": journal.state_dict(),
            "loop": dict(of_loop),
            "random": checkpoints.random_state(),
        },
        keep=keep,
    )


def restore_run(
    collector: Collector, learner: Learner, journal: Journal, saved: checkpoints.Checkpoint
) -> Mapping[str, Any]:
    """Put everything back; the policy has the checkpoint's weights already, and later lines of metrics are removed.

    Args:
        collector, learner, journal: parts of the run.
        saved: of ``save_run``.

    Returns:
        What the loop had to remember.
    """
    learner.load_state(saved.tensors, saved.state)
    collector.load_state_dict(saved.state["collector"])
    journal.load_state_dict(saved.state["journal"])
    checkpoints.restore_random(saved.tensors, saved.state["random"])
    return saved.state["loop"]
