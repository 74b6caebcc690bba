"""A reward model: a transformers sequence classifier that scores a conversation.

The whole conversation is rendered with the classifier's own chat template. Only safetensors are loaded, and no code of
a repository is run. A reward model can be gamed: a policy that is trained against it learns to exploit its errors.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from logitless.errors import ConfigurationError, UnavailableError
from logitless.hub import use_cache_if_unreachable
from logitless.rewards.reward import Batch, Columns, Text, TextReward
from logitless.rewards.workers.pooled import ungradable
from logitless.types import Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class RewardModel(TextReward):
    """The score that a classifier gives prompt and completion: its logit, or the probability of a class.

    A completion that is too long for the model, together with its prompt, is `ungradable`. A score that is not finite
    is an `error`.

    Args:
        source: hub name or folder of a sequence classifier with its tokenizer; only safetensors are loaded.
        output: logit: of a model with one class; sigmoid: of that logit; class: the probability of class `index`.
        index: the class, for `output: class`.
        device: auto, cpu, cuda, cuda:1, ...; another device than the policy's takes none of its memory.
        dtype: of its weights.
        template: plain text with `{prompt}` and `{completion}`, used instead of the tokenizer's chat template.
        max_tokens: of prompt and completion together; null: the model's number of positions.
        tokens_per_batch: tokens of one forward pass, padding included; changes memory and speed only.
        ungradable_score: of a completion that is too long; no wrong answer should score less.

    Raises:
        ConfigurationError: a template without its fields, or a limit that is not positive.
    """

    name: Literal["reward_model"] = "reward_model"
    source: str
    output: Literal["logit", "sigmoid", "class"] = "logit"
    index: int = 1
    device: str = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    template: str | None = None
    max_tokens: int | None = None
    tokens_per_batch: int = 16384
    ungradable_score: float | None = 0.0

    def __post_init__(self) -> None:
        if self.template is not None and not all(f in self.template for f in ("{prompt}", "{completion}")):
            raise ConfigurationError(
                needed="a template with {prompt} and {completion}", given=repr(self.template), remedy="Add them."
            )
        if self.tokens_per_batch < 1 or (self.max_tokens is not None and self.max_tokens < 1):
            raise ConfigurationError(
                needed="positive limits of a reward model",
                given=f"tokens_per_batch={self.tokens_per_batch}, max_tokens={self.max_tokens}",
                remedy="Raise them.",
            )

    def check(self, columns: Columns) -> None:
        """Check that the model can be loaded and has the classes that `output` needs.

        Raises:
            UnavailableError: it cannot be loaded, or its device does not exist.
            ConfigurationError: it has other classes, or there is neither a template nor a chat template.
        """
        del columns
        loaded = self._loaded()
        num_labels, several = loaded.model.config.num_labels, self.output == "class"
        if not 0 <= self.index < num_labels if several else num_labels != 1:
            raise ConfigurationError(
                needed=f"a classifier that gives {f'a class {self.index}' if several else 'a number'}",
                given=f"{num_labels} class(es) in {self.source!r}",
                remedy="Set output: class and index, or output: logit for a model of one.",
            )
        if self.template is None and not loaded.tokenizer.chat_template:
            raise ConfigurationError(
                needed="a chat template for the reward model",
                given=f"none in {self.source!r}",
                remedy="Set template, with {prompt} and {completion}.",
            )

    def grade(self, texts: Sequence[str], batch: Batch) -> list[Verdict]:
        """One verdict per text; texts of similar length share a forward pass."""
        loaded = self._loaded()
        whole = [self._rendered(p, t, loaded.tokenizer) for p, t in zip(batch.prompts, texts, strict=True)]
        ids = loaded.tokenizer(whole, add_special_tokens=self.template is not None)["input_ids"]
        limit = self.max_tokens or getattr(loaded.model.config, "max_position_embeddings", None)
        fitting = [i for i, row in enumerate(ids) if row and (limit is None or len(row) <= limit)]
        scores: dict[int, float] = {}
        for part in _batches([len(ids[i]) for i in fitting], self.tokens_per_batch, pads=loaded.pads(ids)):
            rows = [fitting[k] for k in part]
            scores |= dict(zip(rows, self._scores(loaded, [ids[i] for i in rows]), strict=True))
        return [
            _graded(scores[i]) if i in scores else ungradable(f"{len(row)} tokens, over {limit}", self.ungradable_score)
            for i, row in enumerate(ids)
        ]

    def _rendered(self, prompt: Text, completion: str, tokenizer: "PreTrainedTokenizerBase") -> str:
        messages: list[Mapping[str, Any]] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        )
        if self.template is not None:
            text = prompt if isinstance(prompt, str) else "\n".join(str(m.get("content") or "") for m in prompt)
            before, _, rest = self.template.partition("{prompt}")
            return f"{before}{text}{rest.replace('{completion}', completion)}"
        conversation = [*messages, {"role": "assistant", "content": completion}]
        rendered: str = tokenizer.apply_chat_template(conversation, tokenize=False)
        return rendered

    def _scores(self, loaded: "_Loaded", rows: Sequence[Sequence[int]]) -> list[float]:
        width, pad = max(map(len, rows)), loaded.model.config.pad_token_id or 0
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], device=loaded.model.device)
        read = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=loaded.model.device)
        with torch.inference_mode():
            logits = loaded.model(input_ids=ids, attention_mask=read).logits.float()
        if self.output == "class":
            return logits.softmax(-1)[:, self.index].tolist()
        return (logits.sigmoid() if self.output == "sigmoid" else logits)[:, 0].tolist()

    def _loaded(self) -> "_Loaded":
        return _load(os.getpid(), self.source, self.device, self.dtype)


@dataclass(frozen=True)
class _Loaded:
    """A classifier on its device, and its tokenizer."""

    model: Any
    tokenizer: "PreTrainedTokenizerBase"

    def pads(self, ids: Sequence[Sequence[int]]) -> bool:
        """Whether rows can be padded: there is a pad token, and no row contains it."""
        # the model takes the last token that is not padding as the end of a row
        pad = self.model.config.pad_token_id
        return pad is not None and not any(pad in row for row in ids)


@functools.lru_cache(maxsize=2)
def _load(_pid: int, source: str, device: str, dtype: str) -> _Loaded:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer  # not where a recipe is only read

    chosen = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    use_cache_if_unreachable()
    try:
        model = AutoModelForSequenceClassification.from_pretrained(
            source, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False
        ).to(chosen)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError, AssertionError) as error:
        raise UnavailableError(
            needed=f"a sequence classifier with a tokenizer, in safetensors, at {source!r} on {chosen}",
            given=str(error).partition("\n")[0],
            remedy="Correct source or device.",
        ) from error
    model.eval().requires_grad_(False)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return _Loaded(model, tokenizer)


def _batches(lengths: Sequence[int], budget: int, *, pads: bool) -> list[list[int]]:
    """Indices of rows by batch: of similar length if rows can be padded, else of equal length."""
    found: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        fits = found and (len(found[-1]) + 1) * lengths[i] <= budget
        if fits and (pads or lengths[found[-1][0]] == lengths[i]):
            found[-1].append(i)
        else:
            found.append([i])
    return found


def _graded(score: float) -> Verdict:
    try:
        return Verdict.graded(score)
    except ValueError:
        return Verdict(score=None, status="error", message=f"the reward model gave {score}")
