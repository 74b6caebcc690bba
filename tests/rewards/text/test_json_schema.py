import pytest

from logitless.errors import DataError
from logitless.rewards.text.json_schema import JsonSchema

CITY = {
    "type": "object",
    "required": ["city"],
    "properties": {"city": {"type": "string"}},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "parses", "valid"),
    [
        ('{"city": "Bonn"}', True, True),
        ('Here:\n```json\n{"city": "Bonn"}\n```\nDone.', True, True),
        ('```\n{"city": "Bonn"}\n```', True, True),
        ('{"city": 5}', True, False),
        ('{"city": "Bonn", "more": 1}', True, False),
        ('Here: {"city": "Bonn"}', False, False),
        ('{"city": NaN}', False, False),
        ("", False, False),
        ("[" * 100_000, False, False),
        ("9" * 10_000, False, False),
    ],
)
def test_what_parses_and_what_is_valid(text, parses, valid):
    verdict = JsonSchema(schema=CITY).verdicts(["p"], [text], {})[0]
    assert verdict.detail == (("json:parses", parses), ("json:valid", valid))
    assert verdict.score == float(valid)


def test_each_row_may_have_a_schema_of_its_own_as_mapping_or_text():
    schemas = [{"type": "integer"}, '{"type": "string"}']
    assert JsonSchema(column="schema")(["p"] * 2, ["5", "5"], schema=schemas) == [1.0, 0.0]


def test_a_reference_elsewhere_is_an_error_and_nothing_is_fetched():
    verdict = JsonSchema(schema={"$ref": "http://127.0.0.1:9/schema.json"}).verdicts(["p"], ["5"], {})[0]
    assert verdict.status == "error"
    assert "Unresolvable" in verdict.message


@pytest.mark.parametrize("schema", [{"type": "no such type"}, "not json", 5, None])
def test_a_row_without_a_schema_is_named(schema):
    with pytest.raises(DataError, match="row 1"):
        JsonSchema(column="schema").check({"schema": [{}, schema]})
