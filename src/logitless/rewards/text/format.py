"""The layout of a completion: reasoning in one pair of tags, the answer in another, and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from logitless.errors import ConfigurationError
from logitless.rewards.reward import Batch, TextReward
from logitless.types import Verdict


@dataclass(frozen=True, kw_only=True)
class Format(TextReward):
    """1 if the completion is ``<think>...</think><answer>...</answer>``, else 0.

    Each tag occurs exactly once, neither content is blank, and there is only white space outside the tags.

    Args:
        think_tag: name of the first pair.
        answer_tag: name of the second pair.
        think_opened: the prompt ends with the opening think tag, so that the completion starts inside it.

    Raises:
        ConfigurationError: an empty tag, or the same tag twice.

    Example:
        >>> reward = Format()
        >>> reward(["2+2="], ["<think>two and two</think> <answer>4</answer>"])
        [1.0]
        >>> reward(["2+2="], ["<answer>4</answer>"])
        [0.0]
    """

    name: Literal["format"] = "format"
    think_tag: str = "think"
    answer_tag: str = "answer"
    think_opened: bool = False

    def __post_init__(self) -> None:
        if not self.think_tag or not self.answer_tag or self.think_tag == self.answer_tag:
            raise ConfigurationError(
                needed="two different tags",
                given=f"think_tag={self.think_tag!r}, answer_tag={self.answer_tag!r}",
                remedy="Give each tag a name of its own.",
            )

    def grade(self, texts: Sequence[str], batch: Batch) -> list[Verdict]:  # noqa: ARG002
        """One verdict a text, with a detail for each pair of tags and for the layout."""
        return [self._verdict(f"<{self.think_tag}>{text}" if self.think_opened else text) for text in texts]

    def _verdict(self, text: str) -> Verdict:
        think, answer = _only_pair(text, self.think_tag), _only_pair(text, self.answer_tag)
        layout = False
        if think is not None and answer is not None and think.end <= answer.start:
            layout = not (text[: think.start] + text[think.end : answer.start] + text[answer.end :]).strip()
        detail = (
            ("format:think", think is not None and bool(think.content.strip())),
            ("format:answer", answer is not None and bool(answer.content.strip())),
            ("format:layout", layout),
        )
        return Verdict.graded(float(all(satisfied for _, satisfied in detail)), detail)


def tagged(text: str, tag: str) -> str | None:
    """The content of the last closed pair of tags, or None.

    Example:
        >>> tagged("so <answer>4</answer>", "answer")
        '4'
    """
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if start < 0 else text[start + len(tag) + 2 : end]


@dataclass(frozen=True)
class _Pair:
    start: int
    end: int
    content: str


def _only_pair(text: str, tag: str) -> _Pair | None:
    """The pair of tags if each of the two occurs exactly once, in order."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    if text.count(opening) != 1 or text.count(closing) != 1:
        return None
    start, close = text.index(opening), text.index(closing)
    if close < start:
        return None
    return _Pair(start, close + len(closing), text[start + len(opening) : close])
