"""Rows of a data set to prompts: chat template, tokenization, counts of what is dropped, and a resumable order.

Nothing is truncated: a prompt that is too long is dropped and counted, or an error.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy
from jaxtyping import Int64
from transformers import PreTrainedTokenizerBase

from logitless.data.sources import DataOptions, Rendered, Row, read_rows
from logitless.errors import CheckpointError, ConfigurationError, DataError, InputError
from logitless.types import Prompt

logger = logging.getLogger("logitless")


@dataclass(frozen=True)
class PromptSet:
    """Prompts, and counts of what was read and dropped.

    Args:
        prompts: in the order of the rows.
        counts: ``rows`` read, ``prompts`` kept, and the dropped: ``empty``, ``too_long``.
    """

    prompts: tuple[Prompt, ...]
    counts: Mapping[str, int]


def load_prompts(
    options: DataOptions,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    too_long: Literal["drop", "error"] = "drop",
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> PromptSet:
    """The prompts of a data set, tokenized in the same way for every engine.

    The chat template writes its own special tokens. Plain text gets the start token that the tokenizer adds, if any,
    and no end token.

    Args:
        options: where the rows come from (``data.sources``).
        too_long: whether a longer one is dropped and counted, or an error.
        tools: for the chat template, in OpenAI's form.
        chat_template_kwargs: further variables of the chat template.

    Raises:
        DataError: a row that is malformed, lacks its prompt, repeats an id or (by ``too_long``) is too long; no prompt
            left.
        ConfigurationError: a system prompt or a conversation without a chat template.
        UnavailableError: a library or the network is missing.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> from logitless.data.sources import FileData
        >>> words = Tokenizer(models.WordLevel({"1": 0, "+": 1, "2": 2, "?": 3}, unk_token="?"))
        >>> words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        >>> path = Path(tempfile.mkdtemp()) / "sums.jsonl"
        >>> _ = path.write_text('{"prompt": "1 + 2", "answer": "3"}\\n{"prompt": " "}\\n')
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
        >>> loaded = load_prompts(FileData(path=path), tokenizer, max_prompt_tokens=8)
        >>> loaded.prompts[0].token_ids.tolist(), loaded.counts["empty"]
        ([0, 1, 2], 1)
    """
    return prompts_of_rows(
        read_rows(options),
        options,
        tokenizer,
        max_prompt_tokens=max_prompt_tokens,
        too_long=too_long,
        tools=tools,
        chat_template_kwargs=chat_template_kwargs,
    )


def prompts_of_rows(
    rows: Sequence[Row],
    options: Rendered,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    too_long: Literal["drop", "error"] = "drop",
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> PromptSet:
    """``load_prompts`` for rows in memory."""
    if options.template is None and options.system is not None and not tokenizer.chat_template:
        raise ConfigurationError(
            needed="a chat template for system",
            given="a tokenizer without one",
            remedy="Set template with {system} and {prompt}, or leave system out.",
        )
    _tell_of_images(rows)
    ids = _row_ids(rows)
    filled = [(row, row_id) for row, row_id in zip(rows, ids, strict=True) if not _is_empty(row)]
    messages = [_messages(row, options, tokenizer) for row, _ in filled]
    variables = dict(chat_template_kwargs)
    if tools is not None:
        variables["tools"] = list(tools)
    texts = [
        _plain_text(row, options) if conversation is None else _chat_text(row, conversation, tokenizer, variables)
        for (row, _), conversation in zip(filled, messages, strict=True)
    ]
    places = [row.place for row, _ in filled]
    token_ids = _token_ids(texts, tokenizer, [conversation is not None for conversation in messages], places)
    prompts = []
    for (row, row_id), conversation, text, tokens in zip(filled, messages, texts, token_ids, strict=True):
        if len(tokens) <= max_prompt_tokens:
            columns = {name: value for name, value in row.values.items() if name not in ("prompt", "id")}
            prompts.append(Prompt(id=row_id, text=text, token_ids=tokens, columns=columns, messages=conversation))
        elif too_long == "error":
            raise DataError(
                needed=f"prompts of at most {max_prompt_tokens} tokens",
                given=f"{len(tokens)} tokens at {row.place} (id {row_id!r})",
                remedy="Raise max_prompt_tokens, shorten the prompt, or set too_long to 'drop'.",
            )
    empty, dropped = len(rows) - len(filled), len(filled) - len(prompts)
    if not prompts:
        raise DataError(
            needed="at least one prompt",
            given=f"{len(rows)} rows from {rows[0].place} on: {empty} empty, {dropped} over {max_prompt_tokens} tokens",
            remedy="Check columns.prompt, or raise max_prompt_tokens.",
        )
    counts = {"rows": len(rows), "prompts": len(prompts), "empty": empty, "too_long": dropped}
    return PromptSet(prompts=tuple(prompts), counts=counts)


def without_overlap(training: Sequence[Prompt], held_out: Sequence[Prompt]) -> tuple[Prompt, ...]:
    """The training prompts whose text is not held out.

    Raises:
        DataError: nothing is left to train on.

    Example:
        >>> one, two = (Prompt(id=name, text=name, token_ids=(0,)) for name in ("one", "two"))
        >>> [prompt.id for prompt in without_overlap([one, two], [two])]
        ['one']
    """
    texts = {prompt.text for prompt in held_out}
    kept = tuple(prompt for prompt in training if prompt.text not in texts)
    if not kept:
        raise DataError(
            needed="at least one prompt to train on that is not held out",
            given=f"{len(training)} prompts, all of them held out",
            remedy="Hold out fewer, or give more data.",
        )
    return kept


class PromptOrder:
    """An endless order over prompts: each epoch is a permutation that (seed, epoch) determines.

    Where a request crosses the end of an epoch, the prompts it took from the old epoch come last in the new one, so
    that no request holds a prompt twice.

    Args:
        num_prompts: at least 1.
        seed: at least 0.

    Raises:
        InputError: no prompts.

    Example:
        >>> order = PromptOrder(4, seed=0)
        >>> sorted(order.next(2) + order.next(2))
        [0, 1, 2, 3]
        >>> resumed = PromptOrder(4, seed=0)
        >>> resumed.load_state_dict(order.state_dict())
        >>> resumed.next(3) == order.next(3)
        True
    """

    def __init__(self, num_prompts: int, seed: int) -> None:
        if num_prompts < 1:
            raise InputError(needed="at least one prompt", given=str(num_prompts), remedy="Give more data.")
        self.num_prompts, self.seed = num_prompts, seed
        self.epoch, self.position = 0, 0
        self._deferred: tuple[int, ...] = ()
        self._epoch_order = self._permutation()

    def next(self, count: int) -> list[int]:
        """The next ``count`` indices of prompts."""
        drawn: list[int] = []
        while len(drawn) < count:
            if self.position == self.num_prompts:
                self.epoch, self.position = self.epoch + 1, 0
                self._deferred = tuple(dict.fromkeys(drawn))
                self._epoch_order = self._permutation()
            taken = self._epoch_order[self.position : self.position + count - len(drawn)]
            self.position += len(taken)
            drawn += taken
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """What the next prompts depend on, as plain numbers."""
        return {
            "num_prompts": self.num_prompts,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
            "deferred": list(self._deferred),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``.

        Raises:
            CheckpointError: the state belongs to another number of prompts or another seed.
        """
        for name in ("num_prompts", "seed"):
            if state[name] != getattr(self, name):
                raise CheckpointError(
                    needed=f"{name}={state[name]}, as when the checkpoint was written",
                    given=f"{name}={getattr(self, name)}",
                    remedy="Resume with the data and the seed of the run.",
                )
        self.epoch, self.position = state["epoch"], state["position"]
        self._deferred = tuple(state["deferred"])
        self._epoch_order = self._permutation()

    def _permutation(self) -> list[int]:
        order = numpy.random.default_rng([self.seed, self.epoch]).permutation(self.num_prompts).tolist()
        deferred = set(self._deferred)
        return [index for index in order if index not in deferred] + [index for index in order if index in deferred]


def _row_ids(rows: Sequence[Row]) -> list[str]:
    ids: dict[str, str] = {}
    for number, row in enumerate(rows):
        value = row.values.get("id", number)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise DataError(
                needed="a text or a whole number as id",
                given=f"{value!r} at {row.place}",
                remedy="Map another column with columns.id, or fill the missing ids.",
            )
        if str(value) in ids:
            raise DataError(
                needed="an id for each row that no other row has",
                given=f"{str(value)!r} at {ids[str(value)]} and at {row.place}",
                remedy="Map another column with columns.id, or number the rows.",
            )
        ids[str(value)] = row.place
    return list(ids)


def _is_empty(row: Row) -> bool:
    """Whether a prompt is null, blank, without messages, or ends with a message without text."""
    prompt = row.values["prompt"]
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        prompt = prompt[-1].get("content")
    if isinstance(prompt, str):
        return not prompt.strip()
    return prompt is None or prompt == []


def _messages(row: Row, options: Rendered, tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, str], ...] | None:
    """The conversation for the chat template; None for plain text."""
    prompt = row.values["prompt"]
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    if isinstance(prompt, str):
        if options.template is not None or not tokenizer.chat_template:
            return None
        return (*system, {"role": "user", "content": prompt})
    if not isinstance(prompt, list) or not all(_is_message(message) for message in prompt):
        raise DataError(
            needed="a prompt that is text, or a list of messages with the texts `role` and `content`",
            given=f"{str(prompt)[:80]!r} at {row.place}",
            remedy="Give each content as one text; images are not read, for no image tower is loaded (docs/models.md)."
            if _has_parts(prompt)
            else "Map the right column with columns.prompt.",
        )
    if options.template is not None or not tokenizer.chat_template:
        raise ConfigurationError(
            needed="a chat template for the conversation",
            given=f"{'template' if options.template else 'a tokenizer without one'} at {row.place}",
            remedy="Use a tokenizer with a chat template and no template, or give prompts as text.",
        )
    if prompt[-1]["role"] == "assistant":
        raise DataError(
            needed="a conversation that leaves the answer to the model",
            given=f"one that ends with the assistant at {row.place}",
            remedy="Move the last message to a column of its own.",
        )
    if system and prompt[0]["role"] == "system":
        raise DataError(
            needed="one system message",
            given=f"system and another one at {row.place}",
            remedy="Leave system out, or remove the message.",
        )
    return (*system, *({name: value for name, value in message.items() if value is not None} for message in prompt))


def _has_parts(prompt: object) -> bool:
    messages = prompt if isinstance(prompt, list) else []
    return any(isinstance(message, dict) and isinstance(message.get("content"), list) for message in messages)


_PLAIN = {str, int, float, bool, type(None)}
"""Types of values that are no image."""


def _is_image(value: object) -> bool:
    """Whether a column's value is an image or a list with one, as ``datasets`` and Parquet files hold them.

    Example:
        >>> _is_image([{"bytes": b"...", "path": None}]), _is_image({"bytes": 4})
        (True, False)
    """
    if type(value) in _PLAIN:
        return False
    if isinstance(value, list):
        return not _PLAIN.issuperset(map(type, value)) and any(map(_is_image, value))  # lists of ids are long
    if isinstance(value, dict):
        return isinstance(value.get("bytes"), bytes) and value.keys() <= {"bytes", "path"}
    return type(value).__module__.split(".")[0] == "PIL"


def _tell_of_images(rows: Sequence[Row]) -> None:
    column = next((name for row in rows for name, value in row.values.items() if _is_image(value)), None)
    if column is not None:
        logger.warning(
            "data: the images of column %r are not read, for no image tower is loaded (docs/models.md); prompts that "
            "need them make no sense without",
            column,
        )


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and all(text is None or isinstance(text, str) for text in value.values())
        and isinstance(value.get("content"), str)
    )


def _plain_text(row: Row, options: Rendered) -> str:
    prompt: str = row.values["prompt"]
    return prompt if options.template is None else options.template.format(prompt=prompt, system=options.system)


def _chat_text(
    row: Row,
    messages: Sequence[Mapping[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    variables: Mapping[str, Any],
) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **variables)
    except TemplateError as error:
        raise DataError(
            needed="a conversation that the tokenizer's chat template accepts",
            given=f"roles {[message['role'] for message in messages]} at {row.place} ({error})",
            remedy="Change the roles, leave system out, or set template.",
        ) from error


def _token_ids(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, chat: Sequence[bool], places: Sequence[str]
) -> list[Int64[numpy.ndarray, "L"]]:
    """Token ids of each text; plain text begins with the start token if the tokenizer adds one."""
    if not texts:
        return []
    try:
        bare = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    except Exception as error:  # the tokenizers library raises no class of its own
        raise _not_tokenized(texts, tokenizer, places, error) from error
    start = tokenizer.bos_token_id
    adds_start = start is not None and tokenizer("")["input_ids"][:1] == [start]
    return [
        numpy.array(tokens if is_chat or not adds_start or tokens[:1] == [start] else [start, *tokens], numpy.int64)
        for tokens, is_chat in zip(bare, chat, strict=True)
    ]


def _not_tokenized(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, places: Sequence[str], error: Exception
) -> DataError:
    """The error for the first text that the tokenizer refuses, with its place, and the character if one is refused."""

    def refuses(text: str) -> bool:
        try:
            tokenizer(text, add_special_tokens=False)
        except Exception:
            return True
        return False

    where, what = "", ""
    for text, place in zip(texts, places, strict=True):
        if refuses(text):
            where = f" at {place}"
            character = next((c for c in dict.fromkeys(text) if refuses(c)), None)
            what = f"{text[:80]!r}" if character is None else f"the character {character!r}"
            break
    return DataError(
        needed="prompts that the tokenizer can read",
        given=f"{what}{where} ({' '.join(str(error).split())})",
        remedy="Change the prompt, or use a tokenizer with an unknown token or with every character.",
    )
