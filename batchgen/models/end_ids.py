"""eos_sources: which ids end a text, and which of a model's files says so. No torch."""

from collections.abc import Iterable, Mapping
from typing import Any

from batchgen.errors import ModelError
from batchgen.models.location import ModelLocation


def eos_sources(location: ModelLocation, tokenizer_ids: Iterable[int]) -> dict[int, list[str]]:
    """Every id that ends a text -> the sources that name it: generation_config, config, tokenizer.

    They often disagree; a model may end with any of them, so all count. A GGUF file's ids come with its
    tokenizer.
    """
    named: list[tuple[str, list[int]]] = []
    for source in ("generation_config", "config"):
        data = location.read_json(f"{source}.json") or {}
        named.append((source, id_list(data.get("eos_token_id"), f"{source}.json")))
    named.append(("tokenizer", list(tokenizer_ids)))
    sources: dict[int, list[str]] = {}
    for source, ids in named:
        for index in ids:
            sources.setdefault(index, []).append(source)
    return sources


def describe_eos(sources: Mapping[int, list[str]]) -> str:
    """One line for the log: "2 (generation_config, config, tokenizer), 0 (generation_config)"."""
    return ", ".join(f"{index} ({', '.join(names)})" for index, names in sources.items()) or "none"


def id_list(value: Any, file_name: str) -> list[int]:
    """An id, a list of ids or None, as a list; -1, which some files say for "none", is left out.

    Raises:
        ModelError: anything else.
    """
    if value is None:
        return []
    items = value if isinstance(value, list | tuple) else [value]
    for item in items:
        if type(item) is not int:
            raise ModelError(f"{file_name}: eos_token_id must be a token id or a list of them; got {value!r}")
    return [item for item in items if item >= 0]
