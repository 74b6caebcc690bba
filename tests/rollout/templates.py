"""Chat templates of four families, cut to their bones, and tokenizers with the families' own special tokens.

What matters here is kept: how a turn ends, what stands between turns, where white space is trimmed, which messages are
refused, and what is rewritten as a conversation grows (Qwen 3 drops earlier thoughts).
"""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

QWEN = """{%- if tools %}<|im_start|>system
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- elif m.role == 'assistant' %}<|im_start|>assistant
{% set said = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- if loop.index0 > ns.last %}<think>

</think>

{% endif %}{{ said }}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

LLAMA_3 = """{{- bos_token }}
{%- for m in messages %}
{%- set role = 'ipython' if m.role == 'tool' else m.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

MISTRAL = """{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.last %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('Only user, assistant and tool roles are supported!') }}{% endif %}
{%- endfor %}"""

GEMMA = """{{- bos_token }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

FAMILIES = {
    "qwen": (
        *(QWEN, "", "<|im_end|>"),
        ["<|im_start|>", "<|endoftext|>"],
        ["<tool_response>", "</tool_response>", "<think>", "</think>"],
    ),
    "llama-3": (
        *(LLAMA_3, "<|begin_of_text|>", "<|eot_id|>"),
        ["<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"],
        [],
    ),
    "mistral": (
        *(MISTRAL, "<s>", "</s>"),
        ["[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
        [],
    ),
    "gemma": (*(GEMMA, "<bos>", "<end_of_turn>"), ["<start_of_turn>", "<eos>"], []),
}
"""(template, start, end of a turn, further special tokens, tokens that are not special) by family."""

MERGES = [("2", "2"), ("\n", "\n"), ("o", "k"), ("ok", "."), ("t", "h"), ("th", "e"), (".", "\n")]
LETTERS = sorted({chr(c) for c in range(32, 127)} | {"\n"})


def chat_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A BPE tokenizer that merges some neighbours, also across what a turn and its end would be as text."""
    template, start, end, special, plain = FAMILIES[family]
    tokens = [*LETTERS, *("".join(pair) for pair in MERGES)]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    made = Tokenizer(models.BPE(vocabulary, MERGES))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[ ]?\S+|\s+"), behavior="isolated")
    made.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end, clean_up_tokenization_spaces=False)
    if start:
        tokenizer.add_special_tokens({"bos_token": start})
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    tokenizer.chat_template = template
    return tokenizer
