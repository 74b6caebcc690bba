"""A tokenizer of single characters, small enough to commit next to a recipe."""

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from logitless.errors import InputError


def character_tokenizer(
    alphabet: str,
    *,
    removed: Sequence[str] = (),
    eos_token: str = "<eos>",
) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, in the format that ``AutoTokenizer`` reads.

    Ids: pad 0, BOS 1, EOS 2, then the characters in the order of ``alphabet``. Encoding adds no special tokens, and
    raises on a character outside of the alphabet.

    Args:
        alphabet: every character of the task, each once.
        removed: texts that are deleted before encoding, in this order, such as the fixed part of an instruction.
        eos_token: text of EOS.

    Returns:
        A tokenizer; ``save_pretrained(folder)`` writes it.

    Raises:
        InputError: a character occurs twice.

    Example:
        >>> tokenizer = character_tokenizer("abc ")
        >>> tokenizer("cab a")["input_ids"]
        [5, 3, 4, 6, 3]
        >>> tokenizer.decode([5, 3, 4, 6, 3, 2], skip_special_tokens=True)
        'cab a'
    """
    twice = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if twice or not alphabet:
        raise InputError(
            needed="an alphabet with each character once",
            given=f"{twice} more than once" if twice else "an empty one",
            remedy="List every character of the task exactly once.",
        )
    pad_token, bos_token = "<pad>", "<bos>"
    special = [pad_token, bos_token, eos_token]
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(text, "") for text in removed])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad_token,
        bos_token=bos_token,
        eos_token=eos_token,
        clean_up_tokenization_spaces=False,
    )
