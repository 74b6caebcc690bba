"""The completion is JSON that satisfies a schema."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from logitless.errors import DataError
from logitless.rewards.reward import Batch, Columns, column
from logitless.rewards.workers.pooled import PooledReward, require
from logitless.types import Verdict


@dataclass(frozen=True, kw_only=True)
class JsonSchema(PooledReward):
    """1 if the completion, or the last fenced block in it, parses and validates, else 0.

    NaN and Infinity are not JSON. References to other schemas are not followed: nothing is downloaded.

    Args:
        schema: one schema for all rows; or None, with ``column``.
        column: column with each row's schema, as a mapping or as JSON text; or None, with ``schema``.

    Raises:
        ConfigurationError: both or neither of ``schema`` and ``column``.

    Example:
        >>> reward = JsonSchema(schema={"type": "object", "required": ["city"]})
        >>> reward(["Where?"] * 2, ['{"city": "Bonn"}', "Bonn"])
        [1.0, 0.0]
    """

    name: Literal["json_schema"] = "json_schema"
    schema: Mapping[str, Any] | None = None
    column: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_one_source("schema", self.column)

    def check(self, columns: Columns) -> None:
        """Check that jsonschema is installed and that every schema is valid."""
        require("jsonschema", "jsonschema")
        import jsonschema

        schemas = [self.schema] if self.column is None else column(columns, self.column)
        for row, schema in enumerate(schemas):
            try:
                rules = json.loads(_as_json(schema))
                jsonschema.validators.validator_for(rules, jsonschema.Draft202012Validator).check_schema(rules)
            except (TypeError, ValueError, jsonschema.SchemaError) as error:
                raise DataError(
                    needed="a JSON schema" if self.column is None else f"a JSON schema in column {self.column!r}",
                    given=f"{error!r:.160}" if self.column is None else f"row {row}: {error!r:.160}",
                    remedy="Correct the schema, or leave the row out.",
                ) from error

    def grade(self, texts: Sequence[str], batch: Batch) -> list[Verdict]:
        """One verdict a text, with a detail for parsing and one for the schema."""
        require("jsonschema", "jsonschema")
        schemas = [self.schema] * len(texts) if self.column is None else column(batch.columns, self.column)
        items = [(_as_json(schema), text) for schema, text in zip(schemas, texts, strict=True)]
        needs = ("jsonschema:Draft202012Validator", "referencing:Registry")
        return [self.verdict(outcome) for outcome in self.run("grade_json", items, needs)]


def _as_json(schema: Any) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)
