"""An engine of somebody else's that does not answer what it was asked is named at its first call."""

import pytest

from logitless.errors import EngineError
from logitless.rollout.environment import SingleTurn
from logitless.rollout.play import play
from logitless.rollout.sampling import SamplingOptions
from logitless.types import Completion, Prompt

ASKED = [Prompt("a", "2+2=", (4,)), Prompt("b", "3+3=", (5,))]


def said(name: str, finish_reason: str = "stop") -> Completion:
    made = Completion(name, (6,), "6", "stop")
    object.__setattr__(made, "finish_reason", finish_reason)  # as where types are not checked
    return made


@pytest.mark.parametrize(
    ("answer", "needed"),
    [
        ([[said("a")] * 2, [said("b")]], "2 completions of prompt 'b'.*; given 1"),
        ([[said("a")] * 2], "each of 2 prompts.*; given 1 lists"),
        ([[said("b")] * 2, [said("a")] * 2], "of prompt 'a', in the prompts' order.*; given one of 'b'"),
        ([[said("a")] * 2, [said("b"), said("a")]], "of prompt 'b'.*; given one of 'a'"),
        ([["6"] * 2, ["6"] * 2], "Completion for prompt 'a'.*; given a str"),
        ([said("a"), said("b")], "2 completions of prompt 'a'.*; given 1"),
        ([[said("a", "eos")] * 2, [said("b")] * 2], "finish_reason stop or length.*; given 'eos'"),
        (None, "a list of completions.*; given a NoneType"),
    ],
)
def test_an_answer_that_was_not_asked_for_is_refused(answer: object, needed: str) -> None:
    class Engine:
        def sample(self, *arguments: object, **options: object) -> object:
            return answer

        def load(self, *arguments: object) -> None: ...
        def close(self) -> None: ...

    with pytest.raises(EngineError, match=needed):
        play(Engine(), ASKED, SingleTurn(), num_samples=2, options=SamplingOptions(3), seed=0)
