"""What an engine answered, checked before it is used: an engine of somebody else's may answer anything."""

from collections.abc import Iterable, Sequence
from typing import Any, get_args

from logitless.errors import EngineError
from logitless.types import Completion, FinishReason, Prompt


def checked(answer: Any, prompts: Sequence[Prompt], num_samples: int) -> list[list[Completion]]:
    """The answer of ``Engine.sample``, if it is what was asked for.

    Args:
        answer: of the engine.
        prompts: that it was asked about.
        num_samples: completions that it was asked for, of each prompt.

    Raises:
        EngineError: another number of completions than asked for, in another order, or something else.

    Example:
        >>> checked([[Completion("7", (4,), "4", "stop")]], [Prompt("7", "2+2=", (4,))], 1)[0][0].text
        '4'
        >>> checked([[]], [Prompt("7", "2+2=", (4,))], 1)
        Traceback (most recent call last):
        logitless.errors.EngineError: needed 1 completions of prompt '7' ...
    """
    groups = [list(group) if isinstance(group, Iterable) else [group] for group in _listed(answer)]
    if len(groups) != len(prompts):
        raise _broken(f"a list of completions for each of {len(prompts)} prompts", f"{len(groups)} lists")
    for prompt, group in zip(prompts, groups, strict=True):
        if len(group) != num_samples:
            raise _broken(f"{num_samples} completions of prompt {prompt.id!r}", f"{len(group)}")
        for each in group:
            if not isinstance(each, Completion):
                raise _broken(f"a logitless.types.Completion for prompt {prompt.id!r}", f"a {type(each).__name__}")
            if each.prompt_id != prompt.id:
                raise _broken(
                    f"completions of prompt {prompt.id!r}, in the prompts' order", f"one of {each.prompt_id!r}"
                )
            if each.finish_reason not in get_args(FinishReason):
                raise _broken(f"finish_reason {' or '.join(get_args(FinishReason))}", repr(each.finish_reason))
    return groups


def check_sampler_logp(completions: Iterable[Completion]) -> None:
    """Refuse completions none of which has ``logp_sampler``, where the algorithm reads it.

    Raises:
        EngineError: the engine gave none.

    Example:
        >>> check_sampler_logp([Completion("7", (4,), "4", "stop", logp_sampler=(-0.5,))])
    """
    sampled = [each for each in completions if each.length]
    if sampled and all(each.logp_sampler is None for each in sampled):
        raise EngineError(
            needed="logp_sampler of sampled tokens, which algorithm.correction or algorithm.filters read",
            given=f"None in all {len(sampled)} completions of the engine",
            remedy="Let the engine give the log-probability of each token that it sampled, or leave that part of the "
            "algorithm out.",
        )


def _listed(answer: Any) -> list[Any]:
    if not isinstance(answer, Iterable):
        raise _broken("a list of completions for each prompt", f"a {type(answer).__name__}")
    return list(answer)


def _broken(needed: str, given: str) -> EngineError:
    return EngineError(
        needed=f"{needed} from rollout.engine", given=given, remedy="Repair what the engine's `sample` returns."
    )
