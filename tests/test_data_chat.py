"""Chats through templates, and which of their tokens are learnt."""

from itertools import pairwise

import chat_templates as templates
import numpy as np
import pytest
from chat_templates import chat_tokenizer, merging_tokenizer, metaspace_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from greedysnake.data import use_chat_template
from greedysnake.data.chat import BadRecordError, ChatTemplate, checked_messages, checked_tools
from greedysnake.data.encoding import encode, encode_spans
from greedysnake.errors import ModelError

CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Well?"},
    {"role": "assistant", "content": "Well."},
]


def learnt(template: str | None, messages: list[dict], tools: list[dict] | None = None) -> list[str]:
    """What the assistant wrote, stretch by stretch."""
    text, spans = ChatTemplate(chat_tokenizer(template)).render(messages, tools)
    return [text[start:end] for start, end in spans]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (templates.MARKED, ["Hello.<|im_end|>", "Well.<|im_end|>"]),
        (templates.PLAIN, ["Hello.<|im_end|>", "Well.<|im_end|>"]),
        (templates.BRACKETS, [" Hello.<|endoftext|>", " Well.<|endoftext|>"]),
        (templates.TRIMMED, ["Hello.<|im_end|>", "Well.<|im_end|>"]),
        (templates.REASONING, ["Hello.<|im_end|>", "<think>\n\n</think>\n\nWell.<|im_end|>"]),
    ],
    ids=["marked", "plain", "brackets", "trimmed", "reasoning"],
)
def test_the_answers_are_learnt_with_the_token_that_ends_them(template, expected):
    assert learnt(template, CHAT) == expected


def test_earlier_reasoning_is_learnt_only_where_the_template_shows_it():
    thought = "<think>\nSo they\ngreet.\n</think>\n\n"
    messages = [
        {**message, "content": thought + message["content"]} if i % 2 else message for i, message in enumerate(CHAT)
    ]
    assert learnt(templates.REASONING, messages) == ["Hello.<|im_end|>", thought + "Well.<|im_end|>"]
    assert learnt(templates.PLAIN, messages) == [thought + "Hello.<|im_end|>", thought + "Well.<|im_end|>"]


WORDS = st.text(st.sampled_from("ab \n<|>é🐍"), max_size=12)


@settings(max_examples=100, deadline=None)
@given(
    system=st.none() | WORDS,
    said=st.lists(st.tuples(WORDS, st.lists(WORDS, min_size=1, max_size=2)), min_size=1, max_size=4),
)
def test_answers_found_by_prefixes_are_those_that_a_template_marks(system, said):
    messages = [{"role": "system", "content": system}] if system is not None else []
    for question, answers in said:
        messages.append({"role": "user", "content": question})
        messages += [{"role": "assistant", "content": answer} for answer in answers]
    texts, tokens = [], []
    for template in (templates.MARKED, templates.PLAIN):
        tokenizer = chat_tokenizer(template)
        text, spans = ChatTemplate(tokenizer).render(messages)
        ((ids, inside),) = encode_spans(tokenizer, [text], [spans])
        texts.append((text, spans))
        tokens.append((ids, inside.tolist()))
    assert texts[0] == texts[1]
    assert tokens[0] == tokens[1]
    reference = tokenizer.apply_chat_template(
        messages, chat_template=templates.MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    assert tokens[0] == (reference["input_ids"], [bool(one) for one in reference["assistant_masks"]])


@settings(max_examples=60, deadline=None)
@given(answers=st.lists(st.text(st.sampled_from("ab \n"), min_size=1, max_size=9), min_size=1, max_size=4))
def test_a_template_that_drops_reasoning_still_shows_each_answer_once(answers):
    messages = [m for a in answers for m in ({"role": "user", "content": "?"}, {"role": "assistant", "content": a})]
    *earlier, last = answers
    if any(not answer.strip() for answer in earlier):
        return  # nothing tells an answer of white space alone apart
    expected = [answer.lstrip("\n") + "<|im_end|>" for answer in earlier]
    assert learnt(templates.REASONING, messages) == [
        *expected,
        "<think>\n\n</think>\n\n" + last.lstrip("\n") + "<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            templates.COUNTING,
            r"message 2 cannot be told apart: the template writes the messages before it as '1 messages.*' at first, "
            r"and as '4 messages.*' once the chat goes on; mark the assistant's part",
        ),
        (
            templates.SHORTENED,
            r"message 2, the assistant's, cannot be told apart: .* as 'llo\.<.*' at first",
        ),
        ("{{ raise_exception('no chats, please') }}", r"refuses it \(TemplateError: no chats, please\)"),
        ("{{ messages[0].content + 1 }}", r"the chat template refuses it \(TypeError: "),
        (
            "{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}",
            "marks nothing of it",
        ),
        ("{{ messages[0].content }}", "writes nothing for message 2, the assistant's"),
    ],
)
def test_a_template_that_does_not_show_the_answers_is_refused(template, message):
    with pytest.raises(BadRecordError, match=message):
        learnt(template, CHAT)


def test_answers_without_an_end_are_told_once(caplog):
    template = ChatTemplate(chat_tokenizer("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"))
    for _ in range(2):
        template.render(CHAT)
    assert [record.getMessage() for record in caplog.records] == [
        "the chat template ends what the assistant says without a special token (its last words are "
        "'assistant: Well.'): a model trained so may not learn where to stop"
    ]
    caplog.clear()
    for one in (templates.MARKED, templates.PLAIN, templates.BRACKETS, templates.REASONING):
        learnt(one, CHAT)
    assert not caplog.records


def test_roles_that_a_template_refuses_are_told():
    with pytest.raises(BadRecordError, match=r"refuses it \(TemplateError: roles must alternate\)"):
        learnt(templates.BRACKETS, [CHAT[0], *CHAT])
    with pytest.raises(BadRecordError, match="its first message is the assistant's; begin with one of the system"):
        learnt(templates.PLAIN, CHAT[1:])
    assert learnt(templates.MARKED, CHAT[1:]) == ["Hello.<|im_end|>", "Well.<|im_end|>"]


def test_tools_reach_the_template():
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = checked_messages(
        [
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": None, "tool_calls": [call], "name": None},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "2."},
        ]
    )
    tokenizer = chat_tokenizer(templates.TRIMMED)
    text, spans = ChatTemplate(tokenizer).render(messages, [tool])
    assert text.startswith('<tools>[{"type": "function"')
    assert [text[start:end] for start, end in spans] == [
        '<call>{"name": "add", "arguments": {"a": 1}}</call><|im_end|>',
        "2.<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "a list of messages is needed, null was found"),
        ("Hi", "a list of messages is needed, a string was found"),
        ([], "a list of messages is needed, an empty list was found"),
        (["Hi"], "message 1 is a string, an object with 'role' and 'content' is needed"),
        ([CHAT[0], {"content": "x"}], "message 2 has no 'role'"),
        (
            [{"from": "human", "value": "x"}],
            "message 1 has no 'role'; rename 'from' to 'role' and",
        ),
        ([{"role": 3, "content": "x"}], "message 1 has an unusable 'role'"),
        ([CHAT[0], {"role": "assistant"}], "message 2 has null as its 'content', text is needed"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 1 has parts that are not text"),
        ([CHAT[0]], r"no message has the role 'assistant' \(roles found: user\), so there is nothing to learn"),
    ],
)
def test_messages_that_are_none_are_told(value, message):
    with pytest.raises(BadRecordError, match=message):
        checked_messages(value)


def test_what_messages_may_hold():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "extra": None}]
    found = checked_messages([{"role": "user", "content": parts, "name": None}, {"role": "assistant", "content": ""}])
    assert found == [{"role": "user", "content": "ab"}, {"role": "assistant", "content": ""}]
    assert checked_tools(None) is checked_tools([]) is checked_tools("") is None
    assert (
        checked_tools('[{"name": "add", "parameters": null}]') == checked_tools([{"name": "add"}]) == [{"name": "add"}]
    )
    for wrong in ("[", "3", ["add"], {"name": "add"}):
        with pytest.raises(BadRecordError, match="field 'tools'"):
            checked_tools(wrong)


def test_a_tokenizer_without_a_template_is_told_what_to_do(tmp_path):
    tokenizer = chat_tokenizer(None)
    with pytest.raises(ModelError, match=r"no chat template.*set data\.chat_template to a file"):
        ChatTemplate(tokenizer)
    path = tmp_path / "chat.jinja"
    with pytest.raises(ModelError, match=r"chat\.jinja cannot be read"):
        use_chat_template(tokenizer, path)
    path.write_text(" \n")
    with pytest.raises(ModelError, match=r"chat\.jinja is empty"):
        use_chat_template(tokenizer, path)
    path.write_text("{% for message %}")
    use_chat_template(tokenizer, path)
    with pytest.raises(ModelError, match="the chat template is wrong in line 1: "):
        ChatTemplate(tokenizer)
    path.write_text(templates.PLAIN)
    use_chat_template(tokenizer, path)
    assert ChatTemplate(tokenizer).render(CHAT)[1]


def decoded(tokenizer, text: str, spans: list[tuple[int, int]]) -> tuple[list[str], list[str]]:
    """The tokens of ``text``, and those in the spans."""
    ((ids, inside),) = encode_spans(tokenizer, [text], [spans])
    return [tokenizer.decode([id_]) for id_ in ids], [
        tokenizer.decode([id_]) for id_, is_inside in zip(ids, inside, strict=True) if is_inside
    ]


def test_a_token_across_a_border_takes_its_white_space_along_and_nothing_else():
    tokenizer = merging_tokenizer(["x12y"] * 50 + ["\n\n"] * 50)
    assert decoded(tokenizer, "x12y", []) == (["x12y"], [])
    assert decoded(tokenizer, "x12y", [(2, 4)]) == (["x", "1", "2", "y"], ["2", "y"])
    assert decoded(tokenizer, "x12y", [(1, 3)]) == (["x", "12", "y"], ["12"])
    assert decoded(tokenizer, "a\n\nb", []) == (["a", "\n\n", "b"], [])
    assert decoded(tokenizer, "a\n\nb", [(2, 4)]) == (["a", "\n\n", "b"], ["\n\n", "b"])
    assert decoded(tokenizer, "a\n\nb", [(0, 2)]) == (["a", "\n\n", "b"], ["a", "\n\n"])


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(st.text(st.sampled_from("ab \n🐍"), min_size=1, max_size=6), min_size=1, max_size=6),
    first=st.booleans(),
    data=st.data(),
)
def test_every_character_is_in_one_token_and_on_its_side_of_the_border(parts, first, data):
    text = "".join(parts)
    borders = [0]
    for part in parts:
        borders.append(borders[-1] + len(part))
    spans = [(start, end) for n, (start, end) in enumerate(pairwise(borders)) if n % 2 == int(first)]
    tokenizer = data.draw(st.sampled_from(TOKENIZERS))
    ((ids, inside),) = encode_spans(tokenizer, [text], [spans])
    assert tokenizer.decode(ids) == text
    assert len(inside) == len(ids)
    # All that is no white space stands on its own side.
    marked = tokenizer.decode([id_ for id_, is_inside in zip(ids, inside, strict=True) if is_inside])
    assert "".join(marked.split()) == "".join("".join(text[start:end] for start, end in spans).split())
    if not spans:
        assert ids == encode(tokenizer, [text])["input_ids"][0]
        assert not inside.any()


TOKENIZERS = [merging_tokenizer(["ab ba\n\nab 🐍🐍 b a", "aa\nbb  ab"] * 20), chat_tokenizer(None)]


def test_sentencepiece_like_tokenizers_get_no_space_in_the_middle():
    tokenizer = metaspace_tokenizer(["▁", "▁one", "▁two", "one", "two", "onetwo", "▁onetwo", "\n"])
    assert decoded(tokenizer, "one two", [(4, 7)]) == (["one", "two"], ["two"])
    ((ids, inside),) = encode_spans(tokenizer, ["one two"], [[(3, 7)]])
    assert tokenizer.convert_ids_to_tokens(ids) == ["▁one", "▁two"]
    assert inside.tolist() == [False, True]
    ((ids, inside),) = encode_spans(tokenizer, ["onetwo"], [[(3, 6)]])
    assert tokenizer.convert_ids_to_tokens(ids) == ["▁one", "two"]
    assert inside.tolist() == [False, True]


def test_white_space_that_a_tokenizer_leaves_out_of_its_offsets_stays_on_its_side():
    from tokenizers import processors

    tokenizer = chat_tokenizer(None)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    text = "a  b "
    offsets = encode(tokenizer, [text], offsets=True)["offset_mapping"][0]
    assert any(start == end for start, end in offsets), "the tokenizer must leave white space out for this test"
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            ((ids, inside),) = encode_spans(tokenizer, [text], [[(start, end)]])
            assert ids == list(text.encode())
            assert np.flatnonzero(inside).tolist() == list(range(start, end))
