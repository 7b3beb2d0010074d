"""load_tokenizer: a folder, hub id or GGUF file -> Tokenizer."""

import hashlib
from pathlib import Path
from typing import Any

from batchgen.config import ModelSettings
from batchgen.content_hash import content_hash
from batchgen.errors import ConfigError, UnsupportedModelError
from batchgen.models.gguf_file import GGUFFile
from batchgen.models.location import ModelLocation, resolve_model
from batchgen.tokenizer.tokenizer import Tokenizer

# Files that fix ids; the chat template is hashed by its text.
_VOCABULARY_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "tekken.json",
)  # fmt: skip


def load_tokenizer(
    model: str,
    *,
    revision: str | None = None,
    tokenizer: str | None = None,
    tokenizer_revision: str | None = None,
    chat_template: str | None = None,
) -> Tokenizer:
    """The tokenizer of a model, or another one in its place.

    Args:
        model: see `batchgen.models.location.resolve_model`.
        revision: of the model's hub repository.
        tokenizer: another model whose tokenizer is to be used.
        tokenizer_revision: of the tokenizer's hub repository; without `tokenizer`, `revision` stands in.
        chat_template: Jinja text, or the path of a file with it, in place of the model's own.

    Raises:
        ConfigError: no such model, or it has no tokenizer.
        UnsupportedModelError: a kind of tokenizer that is not built.
    """
    place = resolve_model(
        tokenizer or model,
        tokenizer_revision if tokenizer or tokenizer_revision else revision,
        tokenizer_only=True,
    )
    template = None if chat_template is None else _template_text(chat_template)
    return _from_gguf(place, template) if place.kind == "gguf" else _from_folder(place, template)


def tokenizer_of(settings: ModelSettings) -> Tokenizer:
    """The tokenizer that an engine's settings name; see `load_tokenizer`."""
    return load_tokenizer(
        settings.model,
        revision=settings.revision,
        tokenizer=settings.tokenizer,
        tokenizer_revision=settings.tokenizer_revision,
        chat_template=settings.chat_template,
    )


def _from_gguf(place: ModelLocation, template: str | None) -> Tokenizer:
    from batchgen.tokenizer.gguf import build_from_gguf

    file = GGUFFile(place.path)
    backend, facts = build_from_gguf(file)
    template = template if template is not None else file.get("tokenizer.chat_template")
    identity = {
        "vocabulary": f"sha256:{file.content_hash('tokenizer.ggml.')}",
        "chat_template": _text_hash(template),
    }
    return Tokenizer(backend, chat_template=template, identity=identity, **facts)


def _from_folder(place: ModelLocation, template: str | None) -> Tokenizer:
    from transformers import AutoTokenizer

    place.read_json(
        "config.json"
    )  # AutoTokenizer reads it too, and would lay its damage at the tokenizer's door
    try:
        loaded = AutoTokenizer.from_pretrained(place.path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged tokenizer.json raises a bare one
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(
            f"{place.name!r} has no tokenizer that can be loaded ({reason}); name one with `tokenizer`"
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModelError(
            f"{place.name!r}: its tokenizer ({type(loaded).__name__}) has no form in the tokenizers library; "
            f"name another with `tokenizer`"
        )
    backend.no_truncation()
    backend.no_padding()
    own = loaded.chat_template
    if isinstance(own, dict):
        own = own.get("default")
    template = template if template is not None else own
    ids = backend.get_vocab(with_added_tokens=True).values()
    eos = loaded.eos_token_id
    return Tokenizer(
        backend,
        vocab_size=max(ids, default=-1) + 1,
        bos_token_id=loaded.bos_token_id,
        eos_token_ids=() if eos is None else (eos,),
        special_names={name: _plain(value) for name, value in loaded.special_tokens_map.items()},
        chat_template=template,
        identity={**_file_hashes(place.path), "chat_template": _text_hash(template)},
    )


def _plain(value: Any) -> Any:
    return [str(item) for item in value] if isinstance(value, list | tuple) else str(value)


def _file_hashes(folder: Path) -> dict[str, str]:
    return {name: content_hash(folder / name) for name in _VOCABULARY_FILES if (folder / name).is_file()}


def _text_hash(text: str | None) -> str:
    return (
        "none"
        if text is None
        else f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"
    )


def _template_text(given: str) -> str:
    """Jinja text as it is; anything without a brace or a line end must be the path of a file."""
    if "{" in given or "\n" in given:
        return given
    path = Path(given).expanduser()
    if not path.is_file():
        raise ConfigError(f"chat_template {given!r} is neither Jinja text nor a file")
    return path.read_text(encoding="utf-8")
