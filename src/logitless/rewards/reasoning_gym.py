"""Verifiers of reasoning-gym tasks.

Some pass the model's text to ``eval``, directly or through sympy's parser. Both are restricted to literals and formulas
here, and each text with more than words and numbers gets a process of its own in a sandbox.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from logitless.errors import ConfigurationError, DataError
from logitless.rewards.reward import Batch, Columns, column, from_json
from logitless.rewards.text.format import tagged
from logitless.rewards.workers.pooled import ConfinedReward, require
from logitless.rewards.workers.sandbox import require_sandbox
from logitless.types import Verdict

REFUSED = {"game_of_life_halting": "its verifier gives 1 to any text where the answer is true"}
"""Tasks that cannot be trained on, and why."""

_ROWS_TRIED = 32


@dataclass(frozen=True, kw_only=True)
class ReasoningGym(ConfinedReward):
    """The task's own score of the completion for its entry, in [0, 1].

    Many tasks give a small score to a wrong answer of the right form. An answer at which the verifier raises scores 0.
    Entries of five tasks have no gold answer (boxnet, graph_color, propositional_logic, rubiks_cube, rush_hour), but
    correct answers are scored.

    Args:
        task: for example ``chain_sum``.
        options: settings that the data was made with, if the task's verifier depends on them.
        column: column with the entry (question, answer, metadata) as the task made it, or as JSON text.
        partial_credit: keep scores between 0 and 1; False makes them 0. Standardized within a group, a small score
            weighs as much as a right answer.
        answer_tag: score the content of the last ``<answer_tag>...</answer_tag>``; without the tags there is no answer.

    Raises:
        ConfigurationError: a task whose verifier cannot be trusted.

    Example:
        >>> entry = {"answer": "abba", "metadata": {"letters": ["a", "b", "a", "b"]}}
        >>> ReasoningGym(task="palindrome_generation")(["Use a, b, a, b."] * 2, ["baab", "ab"], entry=[entry] * 2)
        [1.0, 0.02]
    """

    purpose: ClassVar[str] = "reasoning_gym"
    needs: ClassVar[tuple[str, ...]] = ("reasoning_gym:create_dataset",)
    warm: ClassVar[str] = "logitless.rewards.workers.tasks:warm_reasoning_gym"

    name: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    options: Mapping[str, Any] = field(default_factory=dict)
    column: str = "entry"
    answer_tag: str | None = None
    partial_credit: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task in REFUSED:
            raise ConfigurationError(
                needed="a reasoning-gym task whose verifier can tell right from wrong",
                given=f"{self.task!r}: {REFUSED[self.task]}",
                remedy="Choose another task.",
            )

    def check(self, columns: Columns) -> None:
        """Check that the task exists, that rows hold entries, and that the gold answers of the first rows score 1."""
        require("reasoning_gym", "reasoning-gym")
        from reasoning_gym.factory import DATASETS

        if self.task not in DATASETS:
            raise ConfigurationError(
                needed="the name of a reasoning-gym task", given=repr(self.task), remedy="Correct `task`."
            )
        require_sandbox("grader", self.sandbox)
        entries = [_entry(value, self.column, row) for row, value in enumerate(column(columns, self.column))]
        gold = [row for row, entry in enumerate(entries) if entry["answer"] is not None][:_ROWS_TRIED]
        verdicts = self._verdicts([entries[row] for row in gold], [entries[row]["answer"] for row in gold])
        for row, verdict in zip(gold, verdicts, strict=True):
            if verdict.score != 1.0:
                raise DataError(
                    needed=f"an entry of the task {self.task!r} in column {self.column!r}, made with these options",
                    given=f"one in row {row} whose own answer scores {verdict.score} ({verdict.status})",
                    remedy="Use the task that made the data, its options, and entries that kept their types.",
                )

    def grade(self, texts: Sequence[str], batch: Batch) -> list[Verdict]:
        require("reasoning_gym", "reasoning-gym")
        values = column(batch.columns, self.column)
        entries = [_entry(value, self.column, row) for row, value in enumerate(values)]
        answers = texts if self.answer_tag is None else [tagged(text, self.answer_tag) for text in texts]
        verdicts = self._verdicts(entries, answers)
        if self.partial_credit:
            return verdicts
        return [Verdict.graded(float(v.score == 1.0)) if v.status == "graded" else v for v in verdicts]

    def _verdicts(self, entries: Sequence[Mapping[str, Any]], answers: Sequence[str | None]) -> list[Verdict]:
        options = json.dumps(dict(self.options), sort_keys=True)
        items = [(self.task, options, entry, answer) for entry, answer in zip(entries, answers, strict=True)]
        parsed = [f"{entry['answer']} {answer}" for entry, answer in zip(entries, answers, strict=True)]
        outcomes = self.run_confined("grade_reasoning_gym", items, parsed)
        return [self.verdict(outcome) for outcome in outcomes]


def _entry(value: Any, name: str, row: int) -> Mapping[str, Any]:
    entry = from_json(value)
    if not isinstance(entry, Mapping) or not {"answer", "metadata"} <= set(entry):
        raise DataError(
            needed=f"an entry with answer and metadata in column {name!r}",
            given=f"{value!r:.80} in row {row}",
            remedy="Keep what reasoning-gym made, or name the right `column`.",
        )
    return entry
