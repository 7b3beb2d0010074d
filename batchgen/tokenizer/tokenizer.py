"""Tokenizer: text -> ids -> text, control-token text in data kept as text, and the chat template."""

import json
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import tokenizers

from batchgen.errors import TemplateError
from batchgen.tokenizer.guard import ControlTextGuard, guarded, unguard

if TYPE_CHECKING:
    from batchgen.tokenizer.chat import ChatTemplate


class Tokenizer:
    """A model's tokenizer. All methods may be called from several threads at once.

    Args:
        backend: the tokenizers library's object; truncation and padding must be off.
        vocab_size: number of ids that stand for a token, added ones included; ids from here on have none.
        bos_token_id: the id that begins a text, if the model has one.
        eos_token_ids: the ids that end a text, as the tokenizer's files say; a model may have more.
        special_names: names for chat templates ("bos_token", ...) and their texts.
        chat_template: Jinja text, or None.
        identity: name -> content hash of all that fixes ids.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        vocab_size: int,
        bos_token_id: int | None,
        eos_token_ids: Sequence[int],
        special_names: Mapping[str, Any],
        chat_template: str | None,
        identity: Mapping[str, str],
    ):
        self.backend = backend
        self.vocab_size = vocab_size
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.special_tokens: Mapping[str, int] = {
            token.content: index
            for index, token in sorted(backend.get_added_tokens_decoder().items())
            if token.special
        }
        self.chat_template = chat_template
        self._special_names = dict(special_names)
        self._identity = dict(identity)
        self._guard = ControlTextGuard(self.special_tokens)
        # Control tokens of the literal backend bear this prefix, which no data can guess.
        self._prefix = f"\ufdd0{secrets.token_hex(8)}\ufdd1"
        self._lock = Lock()
        self._templates: dict[str, ChatTemplate] = {}

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` works without a `chat_template` of its own."""
        return self.chat_template is not None

    @property
    def eos_token_id(self) -> int | None:
        """The first of `eos_token_ids`."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special_tokens: bool = True
    ) -> list[int]:
        """The ids of a text.

        Args:
            text: any; a lone surrogate counts as U+FFFD.
            add_special_tokens: put what the model wants around a text (a BOS, say).
            allow_special_tokens: whether text like "<|im_end|>" becomes the control token; else it is text.
        """
        return _ids(self.backend if allow_special_tokens else self._literal, text, add_special_tokens)

    def guard(self, value: str) -> str:
        """Mark control-token text inside data, so that `encode_guarded` keeps it plain text.

        Only tokens that the tokenizer calls special are control tokens. Returns `value` itself when it has
        none; a marked value may be put into any template, once.
        """
        return self._guard.guard(value)

    def encode_guarded(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a rendered text: the template's control tokens are tokens, guarded data is text."""
        if unguard(text) is text:
            return _ids(self.backend, text, add_special_tokens)
        return _ids(self._literal, self._guard.tell_apart(text, self._prefix), add_special_tokens)

    def unguard(self, text: str) -> str:
        """Rendered text without the marks of `guard`, for showing and storing."""
        return unguard(text)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation under the model's chat template or another; see `ChatTemplate.render`.

        Raises:
            TemplateError: there is no template, it is broken, or it refuses the messages.
            InputError: messages of a wrong shape, or a part that is not text.
        """
        source = chat_template if chat_template is not None else self.chat_template
        if source is None:
            raise TemplateError(
                "the model has no chat template; give one (model.chat_template) or use a prompt without chat"
            )
        return self._template(source).render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **kwargs,
        )

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, tokenize: bool = True, **options: Any
    ) -> str | list[int]:
        """A conversation as ids, or as a text without `tokenize`; transformers' name for `render_chat`.

        In the ids control-token text inside messages stays text; in a text nobody can tell it from control
        tokens any more, and it may begin with a BOS that `generate` adds again. `LLM.chat` does all in one.

        Args:
            conversation: as `render_chat` takes it.
            tokenize: give ids.
            **options: of `render_chat`; `add_generation_prompt` is off here unless it is given.
        """
        options = {"add_generation_prompt": False, **options}
        if not tokenize:
            return self.render_chat(conversation, **options)
        text = self.render_chat(guarded(conversation, self.guard), **options)
        return self.encode_guarded(text, add_special_tokens=False)

    def decode(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of ids. Ids without a token are left out; bytes that are no UTF-8 become U+FFFD.

        `spaces_between_special_tokens` is accepted for vLLM's sake; the tokenizers library never adds such
        spaces.
        """
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def identity(self) -> dict[str, str]:
        """Content hashes of vocabulary and chat template, for a job's fingerprint."""
        return dict(self._identity)

    def _template(self, source: str) -> "ChatTemplate":
        from batchgen.tokenizer.chat import ChatTemplate

        template = self._templates.get(source)
        if template is None:
            template = self._templates[source] = ChatTemplate(source, self._special_names)
        return template

    @property
    def _literal(self) -> tokenizers.Tokenizer:
        """The backend with every control token renamed, so that its text is only text. Made on first use."""
        with self._lock:
            return self._made_literal

    @cached_property
    def _made_literal(self) -> tokenizers.Tokenizer:
        return _with_renamed_control_tokens(self.backend, set(self.special_tokens), self._prefix)


def _ids(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    try:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids
    except (TypeError, UnicodeEncodeError):
        if not isinstance(text, str):
            raise
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return backend.encode(whole, add_special_tokens=add_special_tokens).ids


def _with_renamed_control_tokens(
    backend: tokenizers.Tokenizer, control: set[str], prefix: str
) -> tokenizers.Tokenizer:
    """A tokenizer of the same ids in which the control token "<s>" is spelled prefix + "<s>"."""
    data = json.loads(backend.to_str())
    for token in data["added_tokens"]:
        if token["content"] in control:
            token["content"] = prefix + token["content"]
    model = data["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {prefix + text if text in control else text: index for text, index in vocab.items()}
    else:
        model["vocab"] = [[prefix + text if text in control else text, score] for text, score in vocab]
    if model.get("unk_token") in control:
        model["unk_token"] = prefix + model["unk_token"]
    if "merges" in model:
        # A merge that spells a control token would make one out of data.
        model["merges"] = [merge for merge in model["merges"] if _merged(merge) not in control]
    renamed = tokenizers.Tokenizer.from_str(json.dumps(data))
    renamed.no_truncation()
    renamed.no_padding()
    return renamed


def _merged(merge: str | Sequence[str]) -> str:
    return merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge)
