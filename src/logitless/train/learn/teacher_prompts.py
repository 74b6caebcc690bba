"""Prompts of teachers: the same completions after another prompt, which knows more (SDFT, OPSD, SDPO).

The completion's token ids are read as they were sampled. They continue the last token of a prompt, so that the
teacher's prompt has to end as the policy's does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from logitless.data.prompts import prompts_of_rows
from logitless.data.sources import Rendered, Row
from logitless.errors import ConfigurationError, DataError
from logitless.train.recipe.teacher import TeacherSection
from logitless.types import Group, Prompt

_ENDLESS = 2**62
"""Tokens; lengths are checked beside the completion's."""


class TeacherPrompts:
    """Renders ``teacher.template`` for each completion.

    What is rendered takes the place of the conversation's last message, or of a prompt without a conversation. If it is
    blank, no teacher grades the completion. The template knows ``prompt``, the text that it replaces; the prompt's
    columns by their names; ``others``, the group's other completions, highest reward first, each with ``text`` and
    ``reward``; and of the completion itself ``reward`` and ``verdicts``, by name of the reward function.

    Args:
        template: Jinja, in its sandbox.
        tokenizer: of policy and teacher.
        variables: of the chat template.

    Raises:
        ConfigurationError: the template is malformed.

    Example:
        >>> from logitless.models.char_tokenizer import character_tokenizer
        >>> from logitless.types import Completion
        >>> prompts = TeacherPrompts("{{ hint }}{{ prompt }}", character_tokenizer("abc"), {})
        >>> group = Group(Prompt("7", "a", (3,), {"hint": "bc"}), (Completion("7", (4,), "b", "stop"),), ({},), (0.0,))
        >>> prompts([group])[0].text
        'bca'
    """

    def __init__(self, template: str, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> None:
        from jinja2 import StrictUndefined, TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        try:
            self._template = ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(template)
        except TemplateError as error:
            raise ConfigurationError(
                needed="a Jinja template in teacher.template", given=f"{template!r} ({error})", remedy="Correct it."
            ) from error
        self._tokenizer, self._variables = tokenizer, dict(variables)

    def __call__(self, groups: Sequence[Group]) -> list[Prompt | None]:
        """The teacher's prompt for each completion of the groups, in order; None where nothing is rendered.

        Raises:
            DataError: the template reads a name that a row lacks, or moves the completion.
        """
        texts = [self._rendered(group, i) for group in groups for i in range(len(group.completions))]
        pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
        found: list[Prompt | None] = [None] * len(texts)
        for has_conversation in (True, False):
            places = [
                i
                for i, text in enumerate(texts)
                if text.strip() and (pairs[i][0].messages is not None) == has_conversation
            ]
            rows = [Row(f"teacher.template for prompt {pairs[i][0].id!r}", _row(pairs[i][0], texts[i])) for i in places]
            if not rows:
                continue
            made = prompts_of_rows(
                rows,
                Rendered() if has_conversation else Rendered(template="{prompt}"),  # as it is, without a chat template
                self._tokenizer,
                max_prompt_tokens=_ENDLESS,
                chat_template_kwargs=self._variables,
            )
            for i, prompt in zip(places, made.prompts, strict=True):
                self._check_end(prompt, pairs[i][0])
                found[i] = prompt
        return found

    def _rendered(self, group: Group, index: int) -> str:
        from jinja2 import TemplateError

        prompt = group.prompt
        scored = [(reward, i) for i, reward in enumerate(group.rewards) if reward is not None and i != index]
        others = sorted(scored, key=lambda each: -each[0])
        names = {
            **prompt.columns,
            "prompt": prompt.text if prompt.messages is None else prompt.messages[-1]["content"],
            "others": [{"text": group.completions[i].text, "reward": reward} for reward, i in others],
            "reward": group.rewards[index],
            "verdicts": group.verdicts[index],
        }
        try:
            return self._template.render(names)
        except TemplateError as error:
            raise DataError(
                needed=f"teacher.template to read of {', '.join(sorted(names))}",
                given=f"{error} (prompt {prompt.id!r})",
                remedy="Test for it (`{% if others %}`), or give every row the column.",
            ) from error

    def _check_end(self, own: Prompt, prompt: Prompt) -> None:
        end, wanted = int(own.token_ids[-1]), int(prompt.token_ids[-1])
        if end != wanted:
            raise DataError(
                needed="teacher.template to leave the completion where it is, after the policy's last token "
                f"{self._tokenizer.decode([wanted])!r}",
                given=f"it moves it, after {self._tokenizer.decode([end])!r} (prompt {prompt.id!r})",
                remedy="Let the template end as the prompt does, with {{ prompt }} last.",
            )


def _row(prompt: Prompt, text: str) -> dict[str, Any]:
    if prompt.messages is None:
        return {"prompt": text}
    return {"prompt": [*prompt.messages[:-1], {**prompt.messages[-1], "content": text}]}


def teacher_index(section: TeacherSection, prompt: Prompt) -> int:
    """Which of the section's sources grades a prompt.

    Raises:
        DataError: no source has the prompt's name.
    """
    names = list(section.sources)
    if isinstance(section.source, str):
        return 0
    name = prompt.source if section.column is None else str(prompt.columns.get(section.column))
    if name not in names:
        what = "source of data" if section.column is None else f"column {section.column!r}"
        raise DataError(
            needed=f"a teacher for each {what}: {', '.join(map(repr, names))}",
            given=f"{name!r} at prompt {prompt.id!r}",
            remedy="Name a model for it in teacher.source.",
        )
    return names.index(name)
