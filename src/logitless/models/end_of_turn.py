"""Check that a chat template opens the policy's turn, and that the EOS token ends it; repair the tokenizer if not.

A policy that was trained to end its turns with another token never samples EOS: every completion runs to the length
limit. Converted tokenizers (GGUF) and those of base models have this fault.
"""

import logging

from transformers import PreTrainedTokenizerBase

from logitless.errors import ConfigurationError

logger = logging.getLogger("logitless")

_ANSWER = "(what the policy says)"
_CONVERSATION = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]


def mend_end_token(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Make the token that ends the turns of the chat template the tokenizer's EOS token, in place, with a warning.

    The tokenizer is not changed if it has no chat template, if the template cannot render a plain conversation, or if
    it writes nothing after the last turn.

    Args:
        tokenizer: any; it may lack an EOS token.
        name: of the tokenizer, for messages.

    Raises:
        ConfigurationError: turns end with text that is not a token.

    Example:
        >>> from logitless.models.char_tokenizer import character_tokenizer
        >>> tokenizer = character_tokenizer("abc", eos_token="<end>")
        >>> tokenizer.chat_template = "{% for m in messages %}<bos>{{ m.content }}<pad>{% endfor %}"
        >>> mend_end_token(tokenizer, "abc")
        >>> tokenizer.eos_token
        '<pad>'
    """
    behind = _behind_the_last_turn(tokenizer)
    eos = str(tokenizer.eos_token)
    if behind is None or not behind.strip() or (tokenizer.eos_token is not None and eos in behind):
        return
    marks = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content in behind]
    if not marks:
        raise ConfigurationError(
            needed=f"a tokenizer whose EOS token ({eos}) ends the turns of its chat template",
            given=f"turns of {name} that end with {behind!r}, which is no token of its own",
            remedy="Correct eos_token or chat_template in tokenizer_config.json, or name another model.tokenizer.",
        )
    end = min(marks, key=lambda mark: (behind.index(mark), -len(mark)))
    logger.warning(
        "tokenizer: the EOS token of %s is %s, with which no turn of its chat template ends; %s, with which they do, "
        "takes its place",
        *(name, eos, end),
    )
    tokenizer.eos_token = end


def warn_of_unopened_turn(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Warn if the chat template ignores ``add_generation_prompt`` and writes something before an answer.

    Args:
        tokenizer: any; nothing is said of one without a chat template.
        name: of the tokenizer, for the message.
    """
    if not tokenizer.chat_template:
        return
    try:
        opened, closed = (
            str(tokenizer.apply_chat_template(_CONVERSATION[:1], tokenize=False, add_generation_prompt=opens))
            for opens in (True, False)
        )
        whole = str(tokenizer.apply_chat_template(_CONVERSATION, tokenize=False))
    except Exception:  # a template is a program: it can raise anything
        return
    header, found, _ = whole.removeprefix(opened).partition(_ANSWER)
    if opened == closed and whole.startswith(opened) and found and header.strip():
        logger.warning(
            "tokenizer: the chat template of %s ignores add_generation_prompt, so that prompts end before %r and the "
            "policy has to write it; add it to the template under {%% if add_generation_prompt %%}",
            *(name, header),
        )


def _behind_the_last_turn(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The text that the chat template writes after the policy's answer; None if it cannot be found."""
    if not tokenizer.chat_template:
        return None
    try:
        text = str(tokenizer.apply_chat_template(_CONVERSATION, tokenize=False))
    except Exception:  # a template is a program: it can raise anything
        return None
    _, found, behind = text.partition(_ANSWER)
    return behind if found else None
