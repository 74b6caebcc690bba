"""The log of sampled blocks: each is written to a file before it is trained on, and can be taken from there again.

A resumed run takes blocks whose weights are gone from its own log; another run replays them (``replay.py``).
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from logitless.errors import DataError
from logitless.rollout.in_flight import DrawnVersions
from logitless.train.block import JudgedBlock
from logitless.train.collect.group_json import decode_groups, encode_groups
from logitless.train.store.atomic import write_atomically
from logitless.types import Prompt

SCHEMA_NUMBER = 2
"""Of a block's file; another one is refused."""


class BlockLog:
    """For each sampled block a JSON file, and a file with the numbers of its arrays.

    The JSON has the block's number, ``begun_after`` (number of trained blocks whose weights sampled it), ``versions``
    (of these weights, in steps), ``exact``, ``rounds``, ``kept``, the groups with log-probs and verdicts, and the
    collector's position in the prompts before and after it.

    Args:
        folder: of the log; created with the first block.
        prompts: to train on; the log refers to them by id.

    Example:
        >>> BlockLog(Path("/nonexistent"), []).has(0)
        False
    """

    def __init__(self, folder: Path, prompts: Sequence[Prompt]) -> None:
        self.folder, self._prompts = folder, {prompt.id: prompt for prompt in prompts}

    def has(self, block: int) -> bool:
        """Whether the block is in the log."""
        return self._file(block).is_file()

    def write(
        self,
        block: int,
        judged: JudgedBlock,
        *,
        begun_after: int,
        before: Any,
        after: Any,
        drawn: DrawnVersions | None = None,
    ) -> None:
        """Write a block, atomically.

        Args:
            block: number, from 0.
            begun_after: blocks trained on when it began.
            before, after: the collector's states.
            drawn: in flight, which weights sampled which tokens.
        """
        self.folder.mkdir(exist_ok=True)
        completions = [completion for group in judged.sampled for completion in group.completions]
        whole = {c.weights_version for c in completions if c.token_versions is None and c.weights_version is not None}
        versions = whole.union(*(c.token_versions.tolist() for c in completions if c.token_versions is not None))
        rest, numbers = encode_groups(judged.sampled)
        row = {
            "schema_number": SCHEMA_NUMBER,
            "block": block,
            "begun_after": begun_after,
            "versions": sorted(versions),
            "exact": judged.exact,
            "rounds": judged.rounds,
            "kept": judged.kept,
            "before": before,
            "after": after,
            "groups": [
                {"prompt_id": group.prompt.id, **each} for group, each in zip(judged.sampled, rest, strict=True)
            ],
        }
        if drawn is not None:
            row["in_flight"] = drawn.calls
        write_atomically(self._file(block).with_suffix(".numbers"), numbers)
        write_atomically(self._file(block), json.dumps(row, default=str).encode())  # last: ``has`` looks for it

    def read(self, block: int) -> tuple[JudgedBlock, Any]:
        """The block, and the collector's state after it.

        Raises:
            DataError: the block is missing or damaged, or its prompts are others.
        """
        with self._reading(block) as row:
            prompts = [self._prompts[each["prompt_id"]] for each in row["groups"]]
            numbers = self._file(block).with_suffix(".numbers").read_bytes()
            groups = decode_groups(prompts, row["groups"], numbers)
            return JudgedBlock(tuple(groups), tuple(row["kept"]), row["rounds"], row["exact"]), row["after"]

    def begun_after(self, block: int) -> int:
        """Number of trained blocks whose weights sampled the block."""
        with self._reading(block) as row:
            return int(row["begun_after"])

    def drawn(self, block: int) -> DrawnVersions:
        """Which weights sampled which tokens of a block that was sampled in flight."""
        with self._reading(block) as row:
            return DrawnVersions(row["in_flight"])

    @contextmanager
    def _reading(self, block: int) -> Iterator[dict[str, Any]]:
        """A block's JSON; inside, what it lacks is an error about the log."""
        try:
            row = json.loads(self._file(block).read_bytes())
            if row["schema_number"] != SCHEMA_NUMBER:
                raise ValueError(f"schema {row['schema_number']}, of another version of logitless")
            yield row
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                needed=f"block {block + 1} in the log {self.folder}",
                given=f"{type(error).__name__}: {error}",
                remedy="Replay the run with its own data, and no more blocks than it has.",
            ) from error

    def _file(self, block: int) -> Path:
        return self.folder / f"block-{block + 1:06d}.json"
