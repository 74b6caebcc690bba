"""Bodies are counted before objects are made of them."""

import itertools
from types import SimpleNamespace

import pytest

from logitless.tinker import wire
from logitless.tinker.wire import RefusedError

CHUNK = SimpleNamespace(fields_by_number={})
DATUM = SimpleNamespace(
    fields_by_number={1: SimpleNamespace(message_type=CHUNK), 2: SimpleNamespace(message_type=None)}
)
REQUEST = SimpleNamespace(fields_by_number={3: SimpleNamespace(message_type=DATUM)})


def field(number, content):
    return bytes([number << 3 | 2, len(content)]) + content


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (b"", 0),
        (field(3, b"") * 7, 7),
        (field(3, field(1, b"") * 9), 10),
        (field(3, field(2, b"\x0a\x00" * 9)), 2),
        (field(4, field(1, b"") * 9), 1),
        (b"\x08\xff\x01" + b"\x11" + b"\0" * 8 + b"\x1d" + b"\0" * 4, 3),
    ],
    ids=["nothing", "datums", "chunks of a datum", "bytes are no message", "nor unknown fields", "numbers"],
)
def test_fields_of_messages_within_messages_are_counted(body, count):
    assert wire._counted(memoryview(body), REQUEST, 100) == 100 - count
    if count:
        with pytest.raises(RefusedError, match="send less at once"):
            wire._counted(memoryview(body), REQUEST, count - 1)


@pytest.mark.parametrize("body", [b"\x1a", b"\x1a\x05ab", b"\x1b", b"\xff" * 11, b"\x08"])
def test_what_is_no_message_is_an_error(body):
    with pytest.raises((IndexError, ValueError)):
        wire._counted(memoryview(body), REQUEST, 100)


def test_millions_of_empty_messages_are_refused_after_as_many_as_are_allowed():
    body = memoryview(field(3, b"") * (20 * wire.MAX_FIELDS))
    read = itertools.count()
    counted = SimpleNamespace(get=lambda number: (next(read) and None) or REQUEST.fields_by_number.get(number))
    with pytest.raises(RefusedError) as refused:
        wire._counted(body, SimpleNamespace(fields_by_number=counted), wire.MAX_FIELDS)
    assert refused.value.status == 413
    assert next(read) == wire.MAX_FIELDS


@pytest.mark.parametrize("part", [b'{"tokens":[]},', b"[],", b"0,"])
def test_json_of_many_small_values_is_refused_before_it_is_read(part, monkeypatch):
    monkeypatch.setattr(wire.Sample, "model_validate_json", lambda _: 1 / 0)
    monkeypatch.setattr(wire, "MAX_CELLS", 1 << 18)
    with pytest.raises(RefusedError, match="objects and lists"):
        wire.parsed(wire.Sample, b'{"prompt":{"chunks":[' + part * (1 << 19) + b"]}}")
