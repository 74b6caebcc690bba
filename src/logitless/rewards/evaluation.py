"""Score a file of responses with a suite or a reward, in worker processes, and report the result.

Prompts and responses are JSON Lines with the official field names; responses may also come from ``logitless sample
--out``, several for a prompt. A prompt without a response is ``missing``, a response without a prompt is skipped; both
are counted and neither is an error.
"""

import importlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from logitless.errors import ConfigurationError, DataError
from logitless.json_lines import json_lines
from logitless.rewards.instructions.suites import SuiteName, read_constraints
from logitless.rewards.reward import TextReward
from logitless.rewards.user_function import Function
from logitless.rewards.wilson import wilson_interval
from logitless.rewards.workers.pool import Outcome, WorkerPool
from logitless.rewards.workers.pooled import verdict_of
from logitless.types import Verdict, VerdictStatus

T = TypeVar("T")
V = TypeVar("V")

CHUNK = 512
"""Responses between two calls of ``progress``."""

SCORE = "logitless.rewards.instructions.suites:score_response"
PRELOAD = "logitless.rewards.instructions.preload:loaded"


@dataclass(frozen=True)
class PromptRow:
    """One row of a prompts file.

    Args:
        line: number in the file, from 1.
        prompt: its text.
        columns: all other fields.
    """

    line: int
    prompt: str
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class Pairing:
    """Prompts with their responses.

    Args:
        rows: the prompts in the order of their file; one with several responses is repeated.
        responses: one each; None if there is none.
        num_skipped: number of responses without a prompt.
    """

    rows: Sequence[PromptRow]
    responses: Sequence[str | None]
    num_skipped: int


@dataclass(frozen=True)
class SuiteVerdict:
    """A suite's verdict on one response.

    Args:
        status: as in ``Verdict``; ``missing`` also without a response.
        strict, loose: whether each constraint is satisfied, in the prompt's order; all False if ``ungradable``, empty
            for other statuses than ``graded``.
        message: why it is not graded.
    """

    status: VerdictStatus
    strict: tuple[bool, ...] = ()
    loose: tuple[bool, ...] = ()
    message: str = ""

    @property
    def counts(self) -> bool:
        """Whether the response counts in rates; an ungradable one counts as satisfying nothing."""
        return self.status in ("graded", "ungradable")


@dataclass(frozen=True)
class Rate:
    """A fraction that passed, with Wilson's 95 % interval.

    Example:
        >>> rate = Rate(passed=8, count=10)
        >>> f"{rate.value:.3f} in [{rate.interval[0]:.3f}, {rate.interval[1]:.3f}]"
        '0.800 in [0.490, 0.943]'
    """

    passed: int
    count: int

    @property
    def value(self) -> float:
        """The fraction that passed; nan if ``count`` is 0."""
        return self.passed / self.count if self.count else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """``wilson_interval``."""
        return wilson_interval(self.value, self.count)


@dataclass(frozen=True)
class SuiteReport:
    """The four official rates, the rates of each constraint family, and the number of prompts by status."""

    prompt_strict: Rate
    prompt_loose: Rate
    instruction_strict: Rate
    instruction_loose: Rate
    families: Mapping[str, Mapping[Literal["strict", "loose"], Rate]]
    statuses: Mapping[VerdictStatus, int]


def read_pairing(prompts: Path, responses: Path, *, column: str = "prompt") -> Pairing:
    """Read both files and pair rows by ``prompt``, stripped, or by ``key`` if responses have no prompt.

    Args:
        prompts, responses: the files.
        column: that has the prompts in their file; responses may name it so too.

    Raises:
        DataError: a file or line that cannot be read, a field that is absent or of another type, or two rows of one
            file with the same prompt or key.
    """
    prompt_rows = [(line, _with_prompt(prompts, line, row, column)) for line, row in _rows(prompts)]
    response_rows = [(line, _response(row, column)) for line, row in _rows(responses)]
    name = "prompt" if all("prompt" in row for _, row in response_rows) else "key"
    for line, row in response_rows if name == "key" else ():
        if row.get("prompt") is None and row.get("key") is None:
            needed = "a field 'prompt', or in both files 'key', that says which prompt is answered"
            raise _wrong(responses, line, needed, f"fields {sorted(row)}")
    places = _places(prompts, prompt_rows, name)
    if name == "prompt" and all("key" in row for _, row in prompt_rows):
        _places(prompts, prompt_rows, "key")
    by_prompt: dict[str, list[str]] = {}
    skipped = set[str]()
    for identity, line, row in _identified(responses, response_rows, name):
        response = row.get("response")
        if response is not None and not isinstance(response, str):
            raise _wrong(responses, line, "a text in field 'response'", f"{response!r:.80}")
        if "response" not in row:
            raise _wrong(responses, line, "a field 'response'", f"fields {sorted(row)}")
        if identity not in places:
            skipped.add(identity)
        elif response is not None:
            by_prompt.setdefault(identity, []).append(response)
    pairs: list[tuple[PromptRow, str | None]] = []
    for identity, (line, row) in places.items():
        if not isinstance(row.get("prompt"), str):
            raise _wrong(prompts, line, "a text in field 'prompt'", f"{row.get('prompt')!r:.80}")
        prompt = PromptRow(line, row["prompt"], {field: value for field, value in row.items() if field != "prompt"})
        pairs += [(prompt, response) for response in by_prompt.get(identity, [None])]
    return Pairing([row for row, _ in pairs], [response for _, response in pairs], len(skipped))


def _with_prompt(path: Path, line: int, row: dict[str, Any], column: str) -> dict[str, Any]:
    if column == "prompt":
        return row
    if column not in row:
        raise _wrong(path, line, f"a field {column!r}", f"fields {sorted(row)}")
    return {**row, "prompt": row[column]}


def _response(row: dict[str, Any], column: str) -> dict[str, Any]:
    """A row with the official field names; in files of ``logitless sample --out`` the response is ``text``."""
    row = {"prompt": row[column], **row} if column in row else row
    return {**row, "response": row["text"]} if "token_ids" in row and "text" in row else row


def score_suite(
    pairing: Pairing,
    suite: SuiteName,
    *,
    workers: int = 2,
    deadline_seconds: float = 10.0,
    progress: Callable[[int], None] | None = None,
) -> list[SuiteVerdict]:
    """A suite's verdict on each response, in the order of the prompts.

    Args:
        pairing: prompts with ``instruction_id_list`` and ``kwargs``, and responses.
        suite: that the ids must belong to.
        workers: number of processes.
        deadline_seconds: limit on one response; beyond it the status is ``ungradable``.
        progress: called with the number of responses scored since its last call.

    Raises:
        DataError: a row whose ids or arguments are wrong; nothing is scored then.
    """
    for row in pairing.rows:
        key = f", key {row.columns['key']}" if "key" in row.columns else ""
        ids, arguments = row.columns.get("instruction_id_list"), row.columns.get("kwargs")
        read_constraints(ids, arguments, suite=suite, row=f"line {row.line}{key}")
    items = [
        (suite, row.columns["instruction_id_list"], row.columns["kwargs"], response)
        for row, response in zip(pairing.rows, pairing.responses, strict=True)
        if response is not None
    ]
    with WorkerPool(workers) as pool:
        pool.load(SCORE, PRELOAD)

        def score(chunk: Sequence[tuple[Any, ...]]) -> list[SuiteVerdict]:
            outcomes = pool.run(SCORE, chunk, deadline_seconds=deadline_seconds)
            return [_suite_verdict(outcome, len(ids)) for outcome, (_, ids, *_) in zip(outcomes, chunk, strict=True)]

        scored = _in_chunks(items, score, progress)
    return _beside_missing(pairing, scored, SuiteVerdict("missing", message="no response"))


def score_reward(
    pairing: Pairing, reward: TextReward, *, progress: Callable[[int], None] | None = None
) -> list[Verdict]:
    """A reward's verdict on each response, in the order of the prompts; the prompts' other fields are its columns.

    Raises:
        ConfigurationError: a column that the reward needs is absent.
        DataError: a row is malformed.
    """
    fields = dict.fromkeys(field for row in pairing.rows for field in row.columns)
    reward.check({field: [row.columns.get(field) for row in pairing.rows] for field in fields})
    pairs = [(row, r) for row, r in zip(pairing.rows, pairing.responses, strict=True) if r is not None]

    def score(chunk: Sequence[tuple[PromptRow, str]]) -> list[Verdict]:
        columns = {field: [row.columns.get(field) for row, _ in chunk] for field in fields}
        return reward.verdicts([row.prompt for row, _ in chunk], [response for _, response in chunk], columns)

    scored = _in_chunks(pairs, score, progress)
    return _beside_missing(pairing, scored, Verdict(score=None, status="missing", message="no response"))


def _in_chunks(
    items: Sequence[T], score: Callable[[Sequence[T]], list[V]], progress: Callable[[int], None] | None
) -> list[V]:
    scored: list[V] = []
    for start in range(0, len(items), CHUNK):
        chunk = items[start : start + CHUNK]
        scored += score(chunk)
        if progress is not None:
            progress(len(chunk))
    return scored


def _beside_missing(pairing: Pairing, scored: Sequence[V], missing: V) -> list[V]:
    """The verdicts on responses in their places, and ``missing`` where there is no response."""
    verdicts = iter(scored)
    return [missing if response is None else next(verdicts) for response in pairing.responses]


def reward_at(path: str) -> TextReward:
    """The reward at an import path: one of the library, or a user's function with TRL's signature.

    Raises:
        ConfigurationError: the path names no reward.

    Example:
        >>> reward_at("logitless.rewards.text.length:Length").name
        'length'
        >>> reward_at("math:fsum").name
        'function'
    """
    module, _, name = path.partition(":")
    if not module.startswith("logitless."):
        return Function(path=path)
    try:
        reward = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError):
        reward = None
    if not isinstance(reward, TextReward):
        raise ConfigurationError(
            needed="a reward that works without options, such as 'logitless.rewards.text.exact:Exact', or a function",
            given=repr(path),
            remedy="Check the spelling; give 'package.module:function' for your own.",
        )
    return reward


def suite_report(pairing: Pairing, verdicts: Sequence[SuiteVerdict]) -> SuiteReport:
    """The rates over all responses that count: see ``SuiteVerdict.counts``."""
    graded = [(ids, verdict) for ids, verdict in zip(_ids(pairing), verdicts, strict=True) if verdict.counts]
    families = sorted({name.partition(":")[0] for ids, _ in graded for name in ids})
    strict = [list(zip(ids, verdict.strict, strict=True)) for ids, verdict in graded]
    loose = [list(zip(ids, verdict.loose, strict=True)) for ids, verdict in graded]
    return SuiteReport(
        prompt_strict=_prompt_rate(strict),
        prompt_loose=_prompt_rate(loose),
        instruction_strict=_instruction_rate(strict),
        instruction_loose=_instruction_rate(loose),
        families={
            family: {"strict": _instruction_rate(strict, family), "loose": _instruction_rate(loose, family)}
            for family in families
        },
        statuses=Counter(verdict.status for verdict in verdicts),
    )


def official_rows(
    pairing: Pairing, verdicts: Sequence[SuiteVerdict], *, loose: bool = False
) -> Iterator[dict[str, Any]]:
    """The rows of the official output file, strict or loose."""
    for row, ids, verdict in zip(pairing.rows, _ids(pairing), verdicts, strict=True):
        if verdict.counts:
            followed = list(verdict.loose if loose else verdict.strict)
            yield {
                "prompt": row.prompt,
                "instruction_id_list": list(ids),
                "follow_instruction_list": followed,
                "follow_all_instructions": all(followed),
            }


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON Lines."""
    with path.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a JSON Lines or Parquet file; blank lines are skipped."""
    if path.is_dir():
        raise DataError(
            needed=f"a file at {path}",
            given="a folder",
            remedy="Name a file; `logitless sample RUN --file PROMPTS --out FILE` writes a run's responses.",
        )
    if path.suffix == ".parquet" and path.is_file():
        yield from enumerate(_parquet(path), start=1)
        return
    for number, row in json_lines(path, accept_nan=True):
        if not isinstance(row, dict):
            raise _wrong(path, number, "a JSON object", f"{row!r:.80}")
        yield number, row


def _parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise DataError(needed=f"a Parquet file at {path}", given=str(error), remedy="Write it again.") from None
    return rows


def _places(path: Path, rows: Sequence[tuple[int, dict[str, Any]]], name: str) -> dict[str, tuple[int, dict[str, Any]]]:
    """(line, row) by the value of that field, in order."""
    return {identity: (line, row) for identity, line, row in _identified(path, rows, name, once=True)}


def _identified(
    path: Path, rows: Sequence[tuple[int, dict[str, Any]]], name: str, *, once: bool = False
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(value of that field, line, row) of each row.

    Raises:
        DataError: the field is absent, or two rows have the same value; rows of ``logitless sample --out`` may, unless
            ``once``.
    """
    lines: dict[str, int] = {}
    for line, row in rows:
        if row.get(name) is None:
            needed = f"a field {name!r} to pair prompts and responses by"
            raise _wrong(path, line, needed + " (--column names another)" * once, f"fields {sorted(row)}")
        identity = str(row[name]).strip()
        if identity in lines and (once or "token_ids" not in row):
            raise _wrong(path, line, f"every {name} once", f"{identity[:80]!r} as in line {lines[identity]}")
        lines[identity] = line
        yield identity, line, row


def _wrong(path: Path, line: int, needed: str, given: str) -> DataError:
    return DataError(needed=f"{needed} in {path.name}, line {line}", given=given, remedy="Repair the line.")


def _suite_verdict(outcome: Outcome, num_constraints: int) -> SuiteVerdict:
    if outcome.status == "done" and "strict" in outcome.value:
        return SuiteVerdict("graded", tuple(outcome.value["strict"]), tuple(outcome.value["loose"]))
    verdict = verdict_of(outcome)
    unsatisfied = (False,) * num_constraints if verdict.status == "ungradable" else ()
    return SuiteVerdict(verdict.status, unsatisfied, unsatisfied, verdict.message)


def _ids(pairing: Pairing) -> list[Sequence[str]]:
    return [row.columns["instruction_id_list"] for row in pairing.rows]


def _prompt_rate(prompts: Sequence[Sequence[tuple[str, bool]]]) -> Rate:
    return Rate(sum(all(passed for _, passed in prompt) for prompt in prompts), len(prompts))


def _instruction_rate(prompts: Sequence[Sequence[tuple[str, bool]]], family: str | None = None) -> Rate:
    passes = [passed for prompt in prompts for name, passed in prompt if family in (None, name.partition(":")[0])]
    return Rate(sum(passes), len(passes))
