"""Judged groups as they are written down and as they go between ranks: what comes back is equal in every bit."""

import json

from logitless.train.collect.group_json import decode_groups, encode_groups
from logitless.types import Completion, Group, Prompt, Verdict

PROMPT = Prompt("0", "prompt 0", (1,))


def test_numbers_that_need_no_more_travel_in_four_bytes():
    small, large = (Group(PROMPT, (Completion("0", (x,), "", "stop", (-0.1,)),), ({},), (None,)) for x in (7, 2**40))
    assert [len(encode_groups([group])[1]) for group in (small, large)] == [4 + 4 + 4, 4 + 8 + 4]


def test_a_group_comes_back_equal_from_json():
    turns = {"trained": (True, False, True), "turn": (0, 0, 1), "weights_version": 3}
    of_turns = Completion("7", (4, 5, 6), "\ud800 π", "length", (-0.1, 0.0, -1e-300), **turns)
    plain = Completion("7", (), "", "stop")
    graded = Verdict.graded(1 / 3, detail=(("length:at_most", True), ("length:at_most", False)))
    verdicts = ({"a": graded}, {"a": Verdict(None, "timeout", message="over 2 s")})
    group = Group(Prompt("7", "2+2=", (1,)), (of_turns, plain), verdicts, (0.1 + 0.2, None), ((0.5, -0.25), ()))
    large = Group(group.prompt, (Completion("7", (2**40,), "", "stop", (-1e30,)),), verdicts[:1], (1.0,))
    for groups in ([group], [group, large], []):
        rest, numbers = encode_groups(groups)
        assert decode_groups([group.prompt for group in groups], json.loads(json.dumps(rest)), numbers) == groups
