"""What `generate`, `chat` and their like take: every form of a prompt, checked before anything runs."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, NotRequired, TypedDict, TypeVar

from batchgen.engine.messages import pack_ids
from batchgen.errors import ConfigError, UnknownNameError
from batchgen.field_rules import plain
from batchgen.quantities import counted


class TextPrompt(TypedDict):
    """A prompt as a text. `cache_salt` keeps its blocks in the prefix cache apart from those of others."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; its text, if given, is only handed back."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


class Read(NamedTuple):
    """A prompt as it was read: its text, its packed token ids, or both.

    `cache_salt` keeps its blocks in the prefix cache apart from those of other salts.
    """

    text: str | None
    ids: bytes | None = None
    cache_salt: str | None = None


_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_FORMS = "a text, a list of token ids, or a mapping with 'prompt' or 'prompt_token_ids'"

T = TypeVar("T")


def read_prompts(prompts: Any) -> list[Read]:
    """Every prompt of one call: one alone, or any iterable of them; arrays and tensors count as lists.

    Raises:
        ConfigError: something that is no prompt; says which.
    """
    prompts = _plain(prompts)
    if isinstance(prompts, str | Mapping):
        return [_read(prompts, 0)]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise ConfigError(f"prompts must be {_FORMS}, or a list of such; got {type(prompts).__name__}")
    listed = list(prompts)
    if listed and isinstance(listed[0], Integral):
        return [_read(listed, 0)]
    return [_read(prompt, number) for number, prompt in enumerate(listed)]


def read_prompt(prompt: Any) -> Read:
    """The prompt of a call that takes one.

    Raises:
        ConfigError: something that is no prompt, or a list of prompts.
    """
    prompt = _plain(prompt)
    if isinstance(prompt, list | tuple) and prompt and not isinstance(prompt[0], Integral):
        raise ConfigError(f"one prompt is taken at a time, {_FORMS}; got a list with {prompt[0]!r:.50}")
    return _read(prompt, 0)


def read_conversations(messages: Any) -> list[Messages]:
    """One conversation or many, as a list of them.

    Raises:
        ConfigError: something that is no list of messages; says which.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise ConfigError(
            f"messages must be a list of mappings with 'role' and 'content', or a list of such lists; "
            f"got {type(messages).__name__}"
        )
    listed = list(messages)
    conversations = [listed] if listed and isinstance(listed[0], Mapping) else listed
    for number, conversation in enumerate(conversations):
        is_list = isinstance(conversation, Sequence) and not isinstance(conversation, str | bytes)
        if not is_list or not all(isinstance(message, Mapping) for message in conversation):
            raise ConfigError(
                f"conversation {number} must be a list of mappings with 'role' and 'content'; "
                f"got {conversation!r:.80}"
            )
    return conversations


def one_each(value: T | Sequence[T], count: int, name: str, kind: type[T]) -> list[T]:
    """`value` for every prompt, or the values that were given for each.

    Raises:
        ConfigError: another number of values than prompts, or a value of another kind.
    """
    if isinstance(value, kind):
        return [value] * count
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
    for each in values:
        if not isinstance(each, kind):
            raise ConfigError(f"{name} must be {kind.__name__}, or a list of one each; got {each!r:.80}")
    if len(values) != count:
        raise ConfigError(
            f"{name}: {len(values)} given for {counted(count, 'prompt')}; give one for all or one each"
        )
    return values


def _read(prompt: Any, number: int) -> Read:
    prompt = _plain(prompt)
    if isinstance(prompt, str):
        return Read(plain(prompt))
    if not isinstance(prompt, Mapping):
        return Read(None, _packed(prompt, number))
    for key in prompt:
        if key not in _KEYS:
            raise UnknownNameError("key", str(key), _KEYS, f"prompt {number}")
    text, ids = prompt.get("prompt"), _plain(prompt.get("prompt_token_ids"))
    if text is None and ids is None:
        raise ConfigError(
            f"prompt {number}: a mapping needs 'prompt' or 'prompt_token_ids'; got {sorted(prompt)}"
        )
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"prompt {number}: 'prompt' must be a text; got {type(text).__name__}")
    salt = prompt.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ConfigError(f"prompt {number}: 'cache_salt' must be a non-empty text; got {salt!r}")
    return Read(plain(text), None if ids is None else _packed(ids, number), plain(salt))


def _packed(ids: Any, number: int) -> bytes:
    if not isinstance(ids, list | tuple | range):
        raise ConfigError(f"prompt {number} must be {_FORMS}; got {type(ids).__name__}")
    try:
        return pack_ids(ids)
    except (TypeError, OverflowError):
        wrong = next((each for each in ids if not _is_id(each)), ids)
        raise ConfigError(
            f"prompt {number}: token ids must be whole numbers of 32 bits; got {wrong!r:.50}"
        ) from None


def _is_id(value: Any) -> bool:
    return isinstance(value, Integral) and -(2**31) <= int(value) < 2**31


def _plain(value: Any) -> Any:
    """Arrays, tensors and columns as the lists that they hold."""
    return value.tolist() if hasattr(value, "tolist") else value
