r"""An environment of one's own: a template to copy beside a recipe. docs/environments.md says what holds for it.

rewards: []                                   # it pays by itself
rollout:
  environment: {name: own, factory: ./own_environment.py:Guess, options: {tries: 3}, template: "\n{reply}\n"}
  limits: {max_turns: 3, max_tokens: 32}
"""

from dataclasses import dataclass

from logitless import Completion, Prompt, Reply


@dataclass
class Guess:
    """Asks for the letter in the row's column ``answer`` until it is said or the tries are used up.

    Args:
        tries: turns of the policy.
        says: to a turn without the letter.
    """

    tries: int = 3
    says: str = "no"

    def start(self, prompt: Prompt, *, seed: int) -> dict[str, object]:
        """The state of an episode; ``seed`` is for whatever is random in it."""
        del seed
        return {"answer": prompt.columns["answer"], "asked": 0}

    def reply(self, state: dict[str, object], turn: Completion) -> Reply:
        """What follows a turn: a payment and the end, or messages that the policy answers."""
        state["asked"] = int(str(state["asked"])) + 1
        if str(state["answer"]) in turn.text:
            return Reply(reward=1.0)
        if state["asked"] == self.tries:
            return Reply(reward=0.0)
        return Reply(messages=({"role": "user", "content": self.says},))
