import dataclasses
from typing import get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from logitless.rewards.options import RewardOptions
from logitless.rewards.reward import Reward, weighted

ENTRIES = TypeAdapter(tuple[RewardOptions, ...])
KINDS = get_args(get_args(RewardOptions)[0])


def test_entries_of_a_recipe_become_rewards():
    given = [
        {"name": "exact", "column": "gold", "weight": 2},
        {"name": "reasoning_gym", "task": "palindrome_generation", "options": {"min_length": 3}},
        {"name": "function", "path": "package.module:function", "deadline_seconds": 2.0},
        {"name": "format", "gate": True},
    ]
    rewards = weighted(ENTRIES.validate_python(given))
    assert [(entry.name, entry.weight, entry.gate) for entry in rewards] == [
        ("exact", 2.0, False),
        ("reasoning_gym", 1.0, False),
        ("function", 1.0, False),
        ("format", 1.0, True),
    ]


@pytest.mark.parametrize(
    ("entry", "place"),
    [
        ({"name": "exact", "colum": "a"}, "colum"),
        ({"name": "length", "pattern": "a"}, "pattern"),
        ({"name": "exact", "weight": "heavy"}, "weight"),
        ({"name": "exat"}, "exat"),
        ({"column": "a"}, "name"),
        ({"name": "length", "cap": 0}, "cap of at least 1"),
        ({"name": "minimum_length", "minimum": 0}, "minimum of at least 1"),
        ({"name": "repetition", "ngram": 0}, "ngram of at least 1"),
        *(({"name": "relevance", "share": share}, "share above 0") for share in (0.0, 1.1, float("nan"))),
        *(({"name": "format", **tags}, "two different tags") for tags in ({"think_tag": ""}, {"think_tag": "answer"})),
        *(({"name": "regex", **of}, "either `pattern` or `column`") for of in ({}, {"pattern": "a", "column": "b"})),
        *(({"name": "json_schema", **of}, "either `schema` or `column`") for of in ({}, {"schema": {}, "column": "b"})),
        ({"name": "overlong", "max_length": 5}, "buffer"),
        *(({"name": "overlong", "max_length": 10, "buffer": n}, "0 < buffer <= max_length") for n in (0, 11, -1)),
        ({"name": "reasoning_gym", "task": "game_of_life_halting"}, "any text"),
    ],
)
def test_a_wrong_entry_is_refused_by_name(entry, place):
    with pytest.raises(ValidationError, match=place):
        ENTRIES.validate_python([entry])


def test_every_kind_has_its_own_name_is_frozen_and_survives_the_resolved_recipe():
    needed = {"function": {"path": "a:b"}, "regex": {"pattern": "a"}, "reasoning_gym": {"task": "chain_sum"}}
    needed |= {"overlong": {"max_length": 9, "buffer": 3}, "json_schema": {"schema": {"type": "object"}}}
    needed |= {"judge": {"url": "http://127.0.0.1:8000/v1", "model": "j"}}
    for kind in KINDS:
        name = next(field.default for field in dataclasses.fields(kind) if field.name == "name")
        reward = ENTRIES.validate_python([{"name": name, **needed.get(name, {})}])[0]
        assert isinstance(reward, kind)
        assert isinstance(reward, Reward)
        assert ENTRIES.validate_python(ENTRIES.dump_python((reward,), mode="json")) == (reward,)
        with pytest.raises(dataclasses.FrozenInstanceError):
            reward.weight = 2.0
    assert len({kind.__name__ for kind in KINDS}) == len(KINDS) >= 13
