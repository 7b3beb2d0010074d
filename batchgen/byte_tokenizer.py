"""ByteTokenizer: a tokenizer without a vocabulary file, for tests and for jobs with the model `echo:`."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchgen.tokenizer.chat import ChatTemplate

_BOS, _EOS = 256, 257
# A noncharacter that `guard` puts inside control-token text; doubled where the data itself holds it.
_MARK = "\ufdd0"
_CHAT = (
    "{% for message in messages %}{{ '[' ~ message.role ~ ']\n' ~ message.content }}"
    "{{ '\n\n' if add_generation_prompt or not loop.last }}{% endfor %}"
    "{{ '[assistant]\n' if add_generation_prompt }}"
)


class ByteTokenizer:
    """A tokenizer whose ids are UTF-8 bytes, plus `<s>` (256) and `</s>` (257); methods as the real one's."""

    vocab_size = 258
    bos_token_id: int | None = _BOS
    eos_token_ids: tuple[int, ...] = (_EOS,)
    special_tokens: Mapping[str, int] = {"<s>": _BOS, "</s>": _EOS}
    has_chat_template = True

    _special = re.compile("(</?s>)")

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of a text; a lone surrogate becomes U+FFFD."""
        ids = [_BOS] if add_special_tokens else []
        if not allow_special_tokens or "<" not in text:
            return ids + list(utf8(text))
        for piece in self._special.split(text):
            special = self.special_tokens.get(piece)
            ids.extend(utf8(piece) if special is None else (special,))
        return ids

    def guard(self, value: str) -> str:
        """Mark control-token text inside data, so that `encode_guarded` keeps it plain text."""
        if _MARK not in value and not self._special.search(value):
            return value
        value = value.replace(_MARK, _MARK + _MARK)
        return self._special.sub(lambda match: match[0][0] + _MARK + match[0][1:], value)

    def encode_guarded(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text whose data parts went through `guard`."""
        ids = [_BOS] if add_special_tokens else []
        for piece in self._special.split(text):
            special = self.special_tokens.get(piece)
            ids.extend(utf8(self.unguard(piece)) if special is None else (special,))
        return ids

    def unguard(self, text: str) -> str:
        """Rendered text without the marks of `guard`."""
        return re.sub(f"{_MARK}({_MARK}?)", r"\1", text) if _MARK in text else text

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Each message as `[role]`, its content and a blank line; see `ChatTemplate.render`."""
        del chat_template
        return _chat().render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **kwargs,
        )

    def decode(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of token ids; half a character becomes U+FFFD."""
        del spaces_between_special_tokens
        if not ids or max(ids) < _BOS:
            return bytes(ids).decode("utf-8", "replace")
        spelled = (
            {}
            if skip_special_tokens
            else {number: name.encode() for name, number in self.special_tokens.items()}
        )
        pieces = (bytes((i,)) if i < _BOS else spelled.get(i, b"") for i in ids)
        return b"".join(pieces).decode("utf-8", "replace")

    def identity(self) -> dict[str, str]:
        """What the job fingerprint holds of it."""
        return {"tokenizer": "bytes"}


@lru_cache(maxsize=1)
def _chat() -> "ChatTemplate":
    from batchgen.tokenizer.chat import ChatTemplate

    return ChatTemplate(_CHAT, {})


def utf8(text: str) -> bytes:
    """The UTF-8 bytes of a text, with U+FFFD for a lone surrogate."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
