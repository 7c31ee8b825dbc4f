"""Tokenizers made on the spot, and chat templates of every manner that models use."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from greedysnake.data import byte_tokenizer

MARKED = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

# The same text, not marked.
PLAIN = """
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

# No prompt for the assistant, a token at the beginning of the chat and at the end of each answer, strict roles.
BRACKETS = """{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {%- if message.role == 'user' %}{{- '[INST] ' + message.content + ' [/INST]' }}
    {%- else %}{{- ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}"""

# Trims what is said, and writes tools and tool calls.
TRIMMED = """
{%- if tools %}{{- '<tools>' + tools|tojson + '</tools>' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n\n' + message.content|trim }}
    {%- for call in message.tool_calls or [] %}{{- '<call>' + call.function|tojson + '</call>' }}{% endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n\n' }}{% endif %}"""

# Keeps reasoning, even an empty one, in the last turn only.
REASONING = """
{%- set last = namespace(user=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
    {%- if message.role == 'assistant' and loop.index0 > last.user %}
        {%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
        {{- '<think>\n' + (thought if '</think>' in message.content else '') + '\n</think>\n\n' + content }}
    {%- else %}{{- content }}{% endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

# What comes first depends on what comes last: nothing can be told apart.
COUNTING = "{{- messages|length }} messages\n" + PLAIN
# An earlier answer is cut off, but not at its beginning.
SHORTENED = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {{- message.content if loop.last or message.role == 'user' else message.content[:2] }}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""


def chat_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """Bytes, and the special tokens of the templates."""
    tokenizer = byte_tokenizer()
    tokens = [AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>", "<s>")]
    tokenizer.add_special_tokens({"extra_special_tokens": tokens, "bos_token": "<s>"})
    tokenizer.chat_template = template
    return tokenizer


def merging_tokenizer(texts: list[str], template: str | None = None, vocab_size: int = 320) -> PreTrainedTokenizerFast:
    """Byte pairs learnt from ``texts``, merged across everything but the special tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=specials,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        extra_special_tokens=specials[2:],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def metaspace_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """Words that begin with the space before them, and a space put before the first, as sentencepiece does."""
    vocab = {piece: number for number, piece in enumerate(["<unk>", "</s>", *words])}
    backend = Tokenizer(models.Unigram([(piece, -float(n)) for piece, n in vocab.items()], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
