"""ChatTemplate: messages -> the text a chat model was trained on, with the model's own Jinja template.

The environment offers templates what transformers' does (checked against its `apply_chat_template` in the
tests): trimmed blocks, loop controls, a plain `tojson`, `raise_exception`, `strftime_now` and the
`generation` block.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchgen.errors import InputError, TemplateError

log = logging.getLogger(__name__)

PART_JOINER = "\n"

# Where a message's reasoning may stand; templates read the first, gpt-oss the second.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# A noncharacter and a space: a template that strips messages takes the space away, and is so found out.
_CONTINUE_HERE = "\ufddb "


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; here its body is output."""

    tags = {"generation"}  # noqa: RUF012  (the attribute Jinja looks for)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template. Rendering is thread-safe.

    Args:
        source: Jinja text.
        special_tokens: names a template may use ("bos_token", "eos_token", ...) and their texts.

    Raises:
        TemplateError: the text is no valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, Any]):
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._has_warned: set[str] = set()
        try:
            self._template = _environment().from_string(source)
            self._names = meta.find_undeclared_variables(_environment().parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: each with "role" and "content"; content may be a list of parts of type "text", which are
                joined with one newline.
            tools: JSON schemas of functions; the template must show them.
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: end inside the last message instead, so that the model goes on with it.
            **kwargs: more names for the template ("enable_thinking", ...); one that it does not have has no
                effect, which is said once in the log.

        Raises:
            InputError: messages or tools of a wrong shape, or a part that is not text.
            TemplateError: the template fails or refuses these messages, or shows no tools.
        """
        self._check_names(tools, kwargs)
        chat = [_plain_message(message, number) for number, message in enumerate(_sequence(messages))]
        if continue_final_message:
            if add_generation_prompt:
                raise TemplateError(
                    "add_generation_prompt and continue_final_message exclude each other; set one to false"
                )
            if not chat or not isinstance(chat[-1].get("content"), str):
                raise InputError("continue_final_message needs a last message with text content")
            chat[-1]["content"] += _CONTINUE_HERE
        names = {**self._special_tokens, "documents": None, **kwargs}
        try:
            text = self._template.render(
                names, messages=chat, tools=_plain(tools), add_generation_prompt=add_generation_prompt
            )
        except jinja2.TemplateError as error:
            said = error.message or type(error).__name__
            if isinstance(error, jinja2.UndefinedError):
                said += "".join(f"; message {at} has no content" for at in _without_content(chat)[:1])
            raise TemplateError(f"chat template: {said}") from error
        except (
            TypeError,
            ValueError,
            KeyError,
            IndexError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise TemplateError(f"chat template: {type(error).__name__}: {error}") from error
        return _cut_at_mark(text) if continue_final_message else text

    def _check_names(self, tools: Any, names: Mapping[str, Any]) -> None:
        """Refuse tools that the template would not show, and say what else it does not look at."""
        if tools is not None:
            is_list = isinstance(tools, Sequence) and not isinstance(tools, str | bytes)
            if not is_list or not all(isinstance(tool, Mapping) for tool in tools):
                raise InputError(
                    f"tools must be a list of mappings, each the JSON schema of a function; got {tools!r:.60}"
                )
            if tools and "tools" not in self._names:
                raise TemplateError(
                    "the chat template shows no tools; give one that does (chat_template), or leave tools out"
                )
        for name in names:
            if name not in self._names and name not in self._has_warned:
                self._has_warned.add(name)
                log.warning("the chat template does not look at %r, which has no effect", name)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which a prompt must not have.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _sequence(messages: Any) -> Sequence[Any]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InputError(f"messages must be a list of messages, not {type(messages).__name__}")
    return messages


def _plain_message(message: Any, number: int) -> dict[str, Any]:
    """A message as templates expect it: no null keys, content one string, reasoning under its usual names."""
    if not isinstance(message, Mapping):
        raise InputError(
            f"message {number} must be a mapping with 'role' and 'content', not {type(message).__name__}"
        )
    plain = {str(key): _plain(value) for key, value in message.items() if value is not None}
    if not isinstance(plain.get("role"), str):
        raise InputError(f"message {number} has no 'role'")
    if "content" in plain:
        plain["content"] = _text_of(plain["content"], number)
    elif "tool_calls" in plain:
        plain["content"] = ""  # an answer of calls alone; many templates add to the content all the same
    reasoning = next((plain[name] for name in _REASONING_FIELDS if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _without_content(chat: Sequence[Mapping[str, Any]]) -> list[int]:
    return [number for number, message in enumerate(chat) if "content" not in message]


def _text_of(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InputError(
            f"message {number}: content must be text or a list of parts, not {type(content).__name__}"
        )
    if not content:
        raise InputError(f"message {number}: content is an empty list of parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        text = part if isinstance(part, str) else part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            what = f"type {kind!r}" if kind not in (None, "text") else f"no text ({type(part).__name__})"
            raise InputError(
                f"message {number}, part {index}: {what}; only parts of type 'text' are understood"
            )
        texts.append(text)
    return PART_JOINER.join(texts)


def _plain(value: Any) -> Any:
    """Nested data rebuilt from JSON types: a template sees no object with methods of its own."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if callable(getattr(value, "tolist", None)):
        return _plain(value.tolist())
    return str(value)


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_CONTINUE_HERE[0])
    if at < 0:
        raise TemplateError(
            "continue_final_message: the chat template leaves out the end of the last message"
        )
    return text[:at] if text.startswith(_CONTINUE_HERE, at) else text[:at].rstrip()
