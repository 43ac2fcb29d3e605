"""Instruction files: JSON lines of prompts and answers in, tokens and what is to be learnt of them out.

Each line is one example. It has a list of messages, or a prompt and an answer, under names that can be chosen. The
tokenizer's chat template makes one text of it; only the answers are learnt. The tokenizer is one of transformers.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fedqueue.errors import DataError
from fedqueue.training.causal_settings import FieldSettings

PLAIN_TEMPLATE: Final = (
    "{{ bos_token or '' }}{% for message in messages %}{% if not loop.first %}{{ '\n\n' }}{% endif %}"
    "{{ '### ' + message['role'].capitalize() + ':\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token or '' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n\n### Assistant:\n' }}{% endif %}"
)
"""For tokenizers that have no chat template of their own."""

USUAL: Final = (
    FieldSettings(messages="messages"),
    FieldSettings(messages="conversations"),
    FieldSettings(prompt=["instruction", "input"], answer="output"),
    FieldSettings(prompt=["prompt"], answer="completion"),
    FieldSettings(prompt=["prompt"], answer="response"),
    FieldSettings(prompt=["question"], answer="answer"),
    FieldSettings(prompt=["input"], answer="output"),
)
"""Looked for in this order, where a config names no fields."""

ROLES: Final = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}

Message = dict[str, str]
"""A role and a content, as chat templates want them."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One record of a file."""

    messages: list[Message]
    place: str
    """File and line, for errors."""
    label: str | None
    """What it is split by, if that is asked for."""

    @property
    def answer(self) -> str:
        return self.messages[-1]["content"]


@dataclass(frozen=True, slots=True)
class Example:
    tokens: list[int]
    is_answer: list[bool]
    """Which of them are learnt."""


# Files ----------------------------------------------------------------------------------------------------


def read_conversations(
    path: Path,
    fields: FieldSettings | None = None,
    label: str | None = None,
    only: tuple[str, str] | None = None,
) -> list[Conversation]:
    """The records of a file of JSON lines, which may be gzipped; `only`: those in which this field has this value.
    Raises a `DataError` that names file and line."""
    found = [
        _conversation(record, place, fields or FieldSettings(), label)
        for place, record in _records(path)
        if only is None or _has_value(record, place, *only)
    ]
    if not found:
        which = "" if only is None else f" in which {only[0]!r} is {only[1]!r}"
        raise DataError(f"{path} has no records{which}; it must have one JSON object a line")
    return found


def _has_value(record: dict[str, Any], place: str, name: str, value: str) -> bool:
    if name not in record:
        raise DataError(f"{place}: has no field {name!r}, by which task.options.split tells training from testing")
    return str(record[name]) == value


def count_records(path: Path) -> int:
    return sum(1 for _ in _lines(path))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Those that are not empty, with their numbers from 1."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as file:
            yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())
    except FileNotFoundError:
        raise DataError(f"{path} is missing: name a file of JSON lines that is there") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in _lines(path):
        place = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{place}: is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise DataError(f"{place}: must be a JSON object, found {type(record).__name__}")
        yield place, record


def _conversation(record: dict[str, Any], place: str, fields: FieldSettings, label: str | None) -> Conversation:
    if fields.messages is None and fields.prompt is None:
        chosen = next((usual for usual in USUAL if _has(record, usual)), None)
        if chosen is None:
            raise DataError(
                f"{place}: has none of the usual fields (messages, or a prompt and an answer), "
                f"only {', '.join(map(repr, record)) or 'nothing'}; say in task.options.fields which to use"
            )
    else:
        chosen = fields
    if chosen.messages is not None:
        messages = _messages(record, chosen.messages, place)
    else:
        parts = [_text(record, name, place, optional=number > 0) for number, name in enumerate(chosen.prompt or ())]
        answer = _text(record, chosen.answer or "", place)
        messages = [_message("user", "\n\n".join(filter(None, parts))), _message("assistant", answer)]
    if fields.system is not None and (system := _text(record, fields.system, place, optional=True)):
        messages = [_message("system", system), *messages]
    if label is not None and label not in record:
        raise DataError(f"{place}: has no field {label!r}, by which task.options.label splits the records")
    return Conversation(messages, place, None if label is None else str(record[label]))


def _has(record: dict[str, Any], fields: FieldSettings) -> bool:
    if fields.messages is not None:
        return fields.messages in record
    return fields.answer in record and (fields.prompt or [""])[0] in record


def _text(record: dict[str, Any], name: str, place: str, *, optional: bool = False) -> str:
    text = record.get(name)
    if optional and text in (None, ""):
        return ""
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        found = "is missing" if name not in record else f"must be a text, found {type(text).__name__}"
        raise DataError(f"{place}: field {name!r} {found}")
    if not str(text).strip():
        raise DataError(f"{place}: field {name!r} is empty")
    return str(text)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _messages(record: dict[str, Any], name: str, place: str) -> list[Message]:
    given = record.get(name)
    if not isinstance(given, list) or not given:
        raise DataError(f"{place}: field {name!r} must be a list of messages, found {type(given).__name__}")
    messages = []
    for number, entry in enumerate(given, start=1):
        if not isinstance(entry, dict):
            raise DataError(f"{place}: message {number} must be an object, found {type(entry).__name__}")
        role, key = entry.get("role", entry.get("from")), "content" if "content" in entry else "value"
        if role not in ROLES:
            raise DataError(f"{place}: message {number} has role {role!r}; known are {', '.join(ROLES)}")
        messages.append(_message(ROLES[role], _text(entry, key, f"{place}, message {number}")))
    if messages[-1]["role"] != "assistant":
        raise DataError(f"{place}: the last message must be the assistant's, found {messages[-1]['role']}")
    return messages


# Tokens ---------------------------------------------------------------------------------------------------


def with_template(tokenizer: Any) -> Any:
    """The same tokenizer, which has a chat template now."""
    if not tokenizer.chat_template:
        tokenizer.chat_template = PLAIN_TEMPLATE
    return tokenizer


def prompt_tokens(tokenizer: Any, conversation: Conversation) -> list[int]:
    """What the model is given before it writes the last answer."""
    return _tokens(tokenizer, _rendered(tokenizer, conversation.messages[:-1], prompting=True))


def tokenize(tokenizer: Any, conversation: Conversation) -> Example:
    """The text of a conversation; what the assistant says is learnt, with what the template ends it by."""
    return tokenize_all(tokenizer, [conversation])[0]


def tokenize_all(tokenizer: Any, conversations: Sequence[Conversation]) -> list[Example]:
    """Of each. All pieces are made tokens of in one call, which is many times as fast."""
    pieces = [_pieces(tokenizer, conversation) for conversation in conversations]
    texts = [text for one in pieces for text, _ in one]
    tokens = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else ())
    made = []
    for one in pieces:
        example = Example([], [])
        for _, learnt in one:
            found = next(tokens)
            example.tokens.extend(found)
            example.is_answer.extend([learnt] * len(found))
        made.append(example)
    return made


def _pieces(tokenizer: Any, conversation: Conversation) -> list[tuple[str, bool]]:
    """The text of a conversation in pieces, and which of them are learnt.

    Prompts and answers are made tokens of apart: the model later begins its answers after tokens of a whole prompt.
    """
    messages, pieces, text = conversation.messages, list[tuple[str, bool]](), ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _rendered(tokenizer, messages[:number], prompting=True)
        after = _rendered(tokenizer, messages[: number + 1], prompting=False)
        if not (prompt.startswith(text) and after.startswith(prompt)):
            raise DataError(
                f"{conversation.place}: the tokenizer's chat template writes what comes before an answer in another "
                "way once that is there, so it cannot be told apart; use examples of one prompt and one answer, or "
                "another template"
            )
        pieces += [(prompt[len(text) :], False), (after[len(prompt) :], True)]
        text = after
    return pieces


def _rendered(tokenizer: Any, messages: Sequence[Message], *, prompting: bool) -> str:
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=prompting, tokenize=False))


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


# Sequences ------------------------------------------------------------------------------------------------


def pack(lengths: Sequence[int], sequence_length: int, *, together: bool) -> list[list[int]]:
    """Which examples share a sequence, in their order; each is `sequence_length` tokens long at most.

    >>> pack([3, 4, 2, 6, 1], 8, together=True)
    [[0, 1], [2, 3], [4]]
    """
    rows: list[list[int]] = []
    room = 0
    for number, length in enumerate(lengths):
        if not together or length > room:
            rows.append([])
            room = sequence_length
        rows[-1].append(number)
        room -= length
    return rows
