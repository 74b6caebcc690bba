"""Episodes: the policy speaks, an environment answers, until one of them is done.

Sampling one completion a prompt is the environment that never answers (``SingleTurn``). Where one answers, the tokens
of its answer are read and not trained on, and what it pays stays with the turn that earned it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from logitless.errors import InputError
from logitless.rollout.engine import Engine
from logitless.rollout.sampling import SamplingOptions
from logitless.seeds import derived_seed
from logitless.types import Completion, Episode, Prompt


@dataclass(frozen=True)
class Reply:
    """What an environment does after an assistant turn.

    Args:
        reward: paid for that turn.
        messages: what it says, for example ``{"role": "tool", "content": "4"}``; empty ends the episode.
        token_ids: the same as the policy reads it, up to where its next turn begins: the end of the turn before, the
            messages under the chat template and the header of an assistant's message.

    Raises:
        InputError: messages without tokens, or tokens without a message.

    Example:
        >>> Reply(reward=0.5).ends
        True
    """

    reward: float = 0.0
    messages: tuple[Mapping[str, Any], ...] = ()
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.messages) != bool(self.token_ids):
            raise InputError(
                needed="messages and the tokens that they are read as, or neither",
                given=f"{len(self.messages)} messages and {len(self.token_ids)} tokens",
                remedy="Render the messages with the tokenizer's chat template.",
            )

    @property
    def ends(self) -> bool:
        """Whether the episode is over."""
        return not self.messages


@runtime_checkable
class Environment(Protocol):
    """What the policy talks to. An episode has a state of its own, so that one environment serves all at once."""

    def start(self, prompt: Prompt, *, seed: int) -> Any:
        """The state of a new episode.

        Args:
            prompt: that it begins with.
            seed: for whatever is random in it.
        """
        ...

    def reply(self, state: Any, turn: Completion) -> Reply:
        """What follows an assistant turn; may change ``state``.

        Args:
            state: of ``start``.
            turn: the tokens and the text of this turn alone.
        """
        ...


class SingleTurn:
    """One completion, no answer, no reward of its own.

    Example:
        >>> SingleTurn().reply(None, Completion("7", (4,), "4", "stop")).ends
        True
    """

    def start(self, prompt: Prompt, *, seed: int) -> None:
        """Nothing to remember."""

    def reply(self, state: None, turn: Completion) -> Reply:  # noqa: ARG002
        """The end."""
        return Reply()


@dataclass
class _Playing:
    """An episode under way."""

    prompt: Prompt
    sample: int
    state: Any
    turns: list[tuple[Completion, Reply]] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether no turn follows: the environment is done, or the last turn was cut off."""
        if not self.turns:
            return False
        completion, reply = self.turns[-1]
        return reply.ends or completion.finish_reason == "length"

    def next_prompt(self) -> Prompt:
        """What the engine reads for the next turn: everything so far, under an id of its own."""
        ids = list(self.prompt.token_ids)
        for completion, reply in self.turns:
            ids += (*completion.token_ids, *reply.token_ids)
        return Prompt(f"{self.prompt.id}/{self.sample}/{len(self.turns)}", "", tuple(ids))

    def episode(self) -> Episode:
        """All turns as one completion, with what was said and paid."""
        messages = list(self.prompt.messages or ({"role": "user", "content": self.prompt.text},))
        for number, (completion, reply) in enumerate(self.turns):
            messages.append({"role": "assistant", "content": completion.text})
            messages += reply.messages if number + 1 < len(self.turns) else ()
        paid = tuple(reply.reward for _, reply in self.turns)
        return Episode(_joined(self.turns), tuple(messages), paid if any(paid) else ())


def play(
    engine: Engine,
    prompts: Sequence[Prompt],
    environment: Environment,
    *,
    num_samples: int,
    options: SamplingOptions,
    seed: int,
    max_turns: int = 16,
) -> list[list[Episode]]:
    """``num_samples`` episodes of each prompt, all of them a turn at a time.

    Args:
        engine: samples every turn.
        prompts: P, with distinct ids.
        environment: answers.
        num_samples: G.
        options: of each turn; ``max_new_tokens`` bounds a turn, not the episode.
        seed: with the same weights, the same episodes.
        max_turns: after so many turns an episode is over, whatever the environment says.

    Returns:
        G episodes of each prompt, in order. One whose last turn was cut has ``finish_reason="length"``.

    Example:
        >>> class Parrot:
        ...     def sample(self, prompts, num_samples, options, *, seed):
        ...         return [[Completion(p.id, p.token_ids, p.text, "stop")] * num_samples for p in prompts]
        ...     def load(self, weights, version): ...
        ...     def close(self): ...
        >>> asked = [Prompt("7", "2+2=", (4, 9))]
        >>> [[episode]] = play(Parrot(), asked, SingleTurn(), num_samples=1, options=SamplingOptions(9), seed=0)
        >>> episode.completion.token_ids, [message["role"] for message in episode.messages]
        ((4, 9), ['user', 'assistant'])
    """
    playing = [
        [_Playing(p, g, environment.start(p, seed=derived_seed(seed, p.id, g))) for g in range(num_samples)]
        for p in prompts
    ]
    for group, sampled in zip(playing, engine.sample(prompts, num_samples, options, seed=seed), strict=True):
        for each, completion in zip(group, sampled, strict=True):
            each.turns.append((completion, environment.reply(each.state, completion)))
    for number in range(1, max_turns):
        going_on = [each for group in playing for each in group if not each.over]
        if not going_on:
            break
        asked = [each.next_prompt() for each in going_on]
        turns = engine.sample(asked, 1, options, seed=derived_seed(seed, "turn", number))
        for each, [completion] in zip(going_on, turns, strict=True):
            each.turns.append((completion, environment.reply(each.state, completion)))
    return [[each.episode() for each in group] for group in playing]


def _joined(turns: Sequence[tuple[Completion, Reply]]) -> Completion:
    """The turns and what came between them, end to end; a single turn is itself."""
    (first, _), (last, _) = turns[0], turns[-1]
    if len(turns) == 1:
        return first
    ids: list[int] = []
    trained: list[bool] = []
    turn: list[int] = []
    logp: list[float] | None = []
    entropy: list[float] | None = []
    for number, (completion, reply) in enumerate(turns):
        given = reply.token_ids if number + 1 < len(turns) else ()
        ids += (*completion.token_ids, *given)
        trained += [True] * completion.length + [False] * len(given)
        turn += [number] * (completion.length + len(given))
        if logp is not None and completion.logp_sampler is not None:
            logp += (*completion.logp_sampler, *(0.0 for _ in given))  # what is given has probability 1
        else:
            logp = None
        if entropy is not None and completion.entropy_sampler is not None:
            entropy += (*completion.entropy_sampler, *(0.0 for _ in given))
        else:
            entropy = None
    versions = [completion.weights_version for completion, _ in turns]
    return Completion(
        prompt_id=first.prompt_id,
        token_ids=tuple(ids),
        text=last.text,
        finish_reason=last.finish_reason,
        logp_sampler=None if logp is None else tuple(logp),
        trained=tuple(trained),
        turn=tuple(turn),
        weights_version=min((v for v in versions if v is not None), default=None),
        entropy_sampler=None if entropy is None else tuple(entropy),
    )
