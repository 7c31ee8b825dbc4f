"""Chats through a tokenizer's template, and which characters of the result are the assistant's.

A template may mark them itself, with ``{% generation %}``. Where it does not, they are found by rendering the
chat up to each of the assistant's messages: what is rendered for the messages before must be how the whole begins.
"""

import json
import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from greedysnake.data.encoding import Span
from greedysnake.data.records import json_kind, text_problem
from greedysnake.errors import ModelError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Message = dict[str, Any]

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "QX7f0probe"
_ADVICE = "mark the assistant's part in the template with {% generation %} (data.chat_template names a file with one)"


class BadRecordError(Exception):
    """What is wrong with a record, without its place."""


class ChatTemplate:
    """The template of a tokenizer.

    Args:
        tokenizer: with a template.

    Raises:
        ModelError: it has none, or one that is no Jinja.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        if not tokenizer.chat_template:
            raise ModelError(
                "the tokenizer has no chat template, so it is not known how to write a chat down for the model; "
                "set data.chat_template to a file with one, such as examples/chat.jinja"
            )
        from jinja2 import TemplateSyntaxError

        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
        except TemplateSyntaxError as error:
            raise ModelError(f"the chat template is wrong in line {error.lineno}: {error.message}; mend it") from error
        except Exception:  # a template may refuse this chat; whether it takes the data's is seen record by record
            logger.debug("the chat template refuses a chat of one message", exc_info=True)
        self._tokenizer = tokenizer
        special = {*tokenizer.all_special_tokens, *(t.content for t in tokenizer.added_tokens_decoder.values())}
        self._special = tuple(sorted(token for token in special if token.strip()))
        self._told_of_ends = False

    def render(self, messages: list[Message], tools: list[Any] | None = None) -> tuple[str, list[Span]]:
        """The text of a chat, and which stretches of it the assistant wrote.

        Raises:
            BadRecordError: the template refuses the chat, or does not show what the assistant wrote.
        """
        template = self._attempt(lambda: self._tokenizer.get_chat_template(tools=tools))
        if _MARKER.search(template):
            text, spans = self._marked(template, messages, tools)
        else:
            text, spans = self._by_prefixes(messages, tools)
        if problem := text_problem(text):
            raise BadRecordError(problem)
        last = text[slice(*spans[-1])].rstrip()
        if not self._told_of_ends and not last.endswith(self._special):
            self._told_of_ends = True
            logger.warning(
                "the chat template ends what the assistant says without a special token (its last words are %r): a "
                "model trained so may not learn where to stop",
                last[-20:],
            )
        return text, spans

    def _marked(self, template: str, messages: list[Message], tools: list[Any] | None) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = self._attempt(
            lambda: render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        )
        found = [(start, end) for start, end in spans[0] if start < end]
        if not found:
            raise BadRecordError("the chat template marks nothing of it with {% generation %}; mend the template")
        return texts[0], found

    def _by_prefixes(self, messages: list[Message], tools: list[Any] | None) -> tuple[str, list[Span]]:
        def render(part: list[Message], *, prompt: bool = False) -> str:
            if not part:
                raise BadRecordError("its first message is the assistant's; begin with one of the system or the user")
            return str(
                self._attempt(
                    lambda: self._tokenizer.apply_chat_template(
                        part, tools=tools, tokenize=False, add_generation_prompt=prompt
                    )
                )
            )

        whole = render(messages)
        spans: list[Span] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = render(messages[:index], prompt=True)
            if not whole.startswith(before):
                raise BadRecordError(
                    f"message {index + 1} cannot be told apart: the template writes the messages before it as "
                    f"{_difference(before, whole)} once the chat goes on; {_ADVICE}"
                )
            through = render(messages[: index + 1])
            if whole.startswith(through):
                end = len(through)
            else:
                probe = render([*messages[:index], {**message, "content": _PROBE}])
                end = len(before) + _turn_length(before, through, whole, probe=probe, index=index, message=message)
            if end <= len(before):
                raise BadRecordError(f"the template writes nothing for message {index + 1}, the assistant's; {_ADVICE}")
            spans.append((len(before), self._end_without_blanks(whole, len(before), end)))
        return whole, spans

    def _end_without_blanks(self, text: str, start: int, end: int) -> int:
        """``end`` before the white space behind the special token that ends the assistant's turn, if one does."""
        turn = text[start:end].rstrip()
        return start + len(turn) if turn.endswith(self._special) else end

    def _attempt(self, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except BadRecordError:
            raise
        except Exception as error:  # a template runs code of its own: anything can come of an unforeseen chat
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise BadRecordError(f"the chat template refuses it ({reason})") from error


def _turn_length(before: str, through: str, whole: str, *, probe: str, index: int, message: Message) -> int:
    """Characters of a turn that is written otherwise in the middle of a chat than at its end.

    Some templates leave out an earlier turn's reasoning. What is left, the end of the turn as it is written
    last in a chat, must be how ``whole`` goes on after ``before``.
    """
    turn, rest = through[len(before) :], whole[len(before) :]
    mark = probe.rfind(_PROBE)
    closing = probe[mark + len(_PROBE) :]
    content = message.get("content")
    if through.startswith(before) and mark >= 0 and turn.endswith(closing) and isinstance(content, str):
        for start in range(len(turn) - len(closing)):
            core = turn[start : len(turn) - len(closing)].strip()
            if rest.startswith(turn[start:]) and core and content.strip().endswith(core):
                return len(turn) - start
    raise BadRecordError(
        f"message {index + 1}, the assistant's, cannot be told apart: the template writes it as "
        f"{_difference(through, whole)} once the chat goes on; {_ADVICE}"
    )


def _difference(part: str, whole: str) -> str:
    """Where ``whole`` leaves ``part``: a few characters of each."""
    at = next((i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), min(len(part), len(whole)))
    return f"{part[at : at + 20]!r} at first, and as {whole[at : at + 20]!r}"


def checked_messages(value: object) -> list[Message]:
    """``value`` as messages, each with a role and a text.

    Raises:
        BadRecordError: it is anything else, or the assistant says nothing.
    """
    if not isinstance(value, list) or not value:
        found = "an empty list" if isinstance(value, list) else json_kind(value)
        raise BadRecordError(f"a list of messages is needed, {found} was found")
    messages = [_checked_message(one, number) for number, one in enumerate(value, start=1)]
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise BadRecordError(
            f"no message has the role 'assistant' (roles found: {roles}), so there is nothing to learn"
        )
    return messages


def checked_tools(value: object) -> list[Any] | None:
    """``value`` as the tools that a chat may use: a list of JSON schemas, or JSON with one; None for none.

    Raises:
        BadRecordError: it is anything else.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise BadRecordError(f"field 'tools' is not valid JSON ({error})") from error
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRecordError(f"field 'tools' needs a list of objects, {json_kind(value)} was found")
    return [_without_none(tool) for tool in value]


def _checked_message(value: object, number: int) -> Message:
    if not isinstance(value, dict):
        raise BadRecordError(f"message {number} is {json_kind(value)}, an object with 'role' and 'content' is needed")
    # Parquet and Arrow files give every message every key that any message has.
    message: Message = _without_none(value)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        hint = "; rename 'from' to 'role' and 'value' to 'content'" if {"from", "value"} <= message.keys() else ""
        raise BadRecordError(f"message {number} has {'no' if role is None else 'an unusable'} 'role'{hint}")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise BadRecordError(f"message {number} has parts that are not text; only text can be learnt")
        message["content"] = "".join(str(part) for part in parts)
    elif content is None and "tool_calls" in message:
        message["content"] = ""
    elif not isinstance(content, str):
        raise BadRecordError(f"message {number} has {json_kind(content)} as its 'content', text is needed")
    return message


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value
