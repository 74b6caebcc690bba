"""RL post-training of language models without the logits: exact GRPO-family losses, a trainer, rollouts and rewards.

The names below are the public ones. Each is imported on first use, so that a worker process that imports
``logitless.rewards`` loads neither torch nor transformers.

Example:
    >>> import torch, logitless
    >>> hidden, weight, target = torch.zeros(1, 8), torch.zeros(4, 8), torch.tensor([2])
    >>> logitless.token_scores(hidden, logitless.LMHead(weight), target).logp
    tensor([-1.3863])
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logitless.head import score_centering, token_divergence, token_scores
    from logitless.objective import presets
    from logitless.objective.objective import Objective
    from logitless.rollout.environment import Reply
    from logitless.train.callbacks import Callback
    from logitless.train.entry import train
    from logitless.types import (
        CenteredScores,
        Completion,
        Group,
        LMHead,
        PackedBatch,
        PackedInputs,
        Prompt,
        TokenBatch,
        TokenDivergence,
        TokenScores,
        Verdict,
    )

__all__ = [
    "Callback",
    "CenteredScores",
    "Completion",
    "Group",
    "LMHead",
    "Objective",
    "PackedBatch",
    "PackedInputs",
    "Prompt",
    "Reply",
    "TokenBatch",
    "TokenDivergence",
    "TokenScores",
    "Verdict",
    "presets",
    "score_centering",
    "token_divergence",
    "token_scores",
    "train",
]

_MODULES = {
    "Callback": "logitless.train.callbacks",
    "Objective": "logitless.objective.objective",
    "Reply": "logitless.rollout.environment",
    "score_centering": "logitless.head",
    "token_divergence": "logitless.head",
    "token_scores": "logitless.head",
}
_PACKAGES = {"presets": "logitless.objective.presets", "train": "logitless.train"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _PACKAGES:
        return importlib.import_module(_PACKAGES[name])
    return getattr(importlib.import_module(_MODULES.get(name, "logitless.types")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
