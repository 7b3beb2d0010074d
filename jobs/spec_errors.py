"""What a job file's mistakes are called: file, line, key, value, and the nearest valid name."""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from batchgen.errors import nearest
from batchgen.foreign_names import ENGINE_ARGUMENTS, GRAMMAR_OPTIONS, SAMPLING_PARAMETERS
from batchgen.jobs.settings_sections import MOVED_ENGINE_KEYS, MOVED_SAMPLING_KEYS
from batchgen.jobs.yaml_file import KeyPath, YamlDocument

# The settings classes begin their messages with the setting's name, which the key in front already gives.
_NAMED = re.compile(
    r"^(?:sampling parameter|engine setting|structured_outputs:|repetition_detection:) "
    r"'?([\w.]+)'?(?: (?=must |is )|='?[^:]*'?: )"
)
# Places that name the key by themselves.
_OPTIONS = frozenset({"--limit", "--output"})
# A guess in another section than the key's own must be closer than one at home.
_FAR_CUTOFF = 0.8
_MISPLACED_DEPTH = 2
# Section -> names of other tools' and what to do here.
_FOREIGN: dict[KeyPath, Mapping[str, str]] = {
    ("engine",): ENGINE_ARGUMENTS,
    ("sampling",): SAMPLING_PARAMETERS,
    ("sampling", "structured_outputs"): GRAMMAR_OPTIONS,
}

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "a mapping of keys to values",
    "mapping_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "tuple_type": "a list",
    "list_type": "a list",
}


def explain(error: ValidationError, document: YamlDocument, root: type[BaseModel]) -> list[str]:
    """One line for each mistake, in the order of the file."""
    lines = [_line(details, document, root) for details in error.errors(include_url=False)]
    return sorted(dict.fromkeys(lines), key=_line_number)


def _line_number(line: str) -> int:
    found = re.match(r".*?:(\d+): ", line)
    return int(found.group(1)) if found else 0


def _line(details: Mapping[str, Any], document: YamlDocument, root: type[BaseModel]) -> str:
    path: KeyPath = tuple(part for part in details["loc"] if part != "[key]")
    context = details.get("ctx", {})
    if context.get("key"):
        path += tuple(context["key"].split("."))
    named = _NAMED.match(details["msg"])
    if named:
        path += tuple(part for part in named.group(1).split(".") if part not in path)
    message = _message(details, context, path, document, root)
    key = ".".join(map(str, path))
    place = document.place(path)
    if not key or place in _OPTIONS:
        return f"{place}: {message}"
    return f"{place}: {key}: {message}"


def _message(
    details: Mapping[str, Any],
    context: Mapping[str, Any],
    path: KeyPath,
    document: YamlDocument,
    root: type[BaseModel],
) -> str:
    kind, value = details["type"], details["input"]
    if kind == "extra_forbidden":
        return _unknown_key(path, root)
    if kind == "missing":
        return "missing"
    if kind == "quote_it":
        written = document.written.get(path, str(value).lower())
        kind_of_value = "a boolean" if isinstance(value, bool) else "a number"
        return f'must be text, but {written} is {kind_of_value} in YAML; quote it: "{written}"'
    if kind == "refused":
        return _NAMED.sub("", details["msg"])
    if kind == "literal_error":
        expected = context["expected"]
        return f"must be {expected}; got {value!r}{_did_you_mean(str(value), _quoted(expected))}"
    if kind == "too_short":
        return "must not be empty"
    if kind in _EXPECTED:
        # The error is about a key of a mapping; what is written at that path is its value.
        is_key = details["loc"][-1:] == ("[key]",)
        got = repr(value) if is_key else document.written.get(path, repr(value))
        return f"must be {_EXPECTED[kind]}; got {got}"
    rule = details["msg"].removeprefix("Input should be ").removeprefix("String should have ")
    return f"must be {rule}; got {value!r}"


def _unknown_key(path: KeyPath, root: type[BaseModel]) -> str:
    key = str(path[-1])
    here = _model_at(root, path[:-1])
    if key == "max_new_tokens":
        return "the same setting as max_tokens; give one"
    moved = {"engine": MOVED_ENGINE_KEYS, "sampling": MOVED_SAMPLING_KEYS}.get(str(path[0]), {})
    if key in moved:
        return f"belongs elsewhere: write {moved[key]}"
    if instead := _FOREIGN.get(path[:-1], {}).get(key):
        return f"is not offered: {instead}"
    homes = [home for home, model in _sections(root) if model is not here and key in _keys(model)]
    # What stands deep in a section is hardly meant for another one.
    if homes and len(path) <= _MISPLACED_DEPTH:
        return f"belongs under {' or '.join(repr(home) for home in homes)}"
    guess = nearest(key, _keys(here))
    if guess is not None:
        return f"unknown key; did you mean {guess!r}?"
    everywhere = {name: f"{home}.{name}" for home, model in _sections(root) for name in _keys(model)}
    far = get_close_matches(key, everywhere, n=1, cutoff=_FAR_CUTOFF)
    if far:
        return f"unknown key; did you mean {everywhere[far[0]]!r}?"
    return f"unknown key; known here: {', '.join(sorted(_keys(here)))}"


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    guess = nearest(name, known)
    return f"; did you mean {guess!r}?" if guess else ""


def _quoted(text: str) -> list[str]:
    return re.findall(r"'([^']*)'", text)


def _keys(model: type[BaseModel]) -> set[str]:
    hidden = {"base_dir", "notes"}
    return {info.alias or name for name, info in model.model_fields.items()} - hidden


def _model_at(root: type[BaseModel], path: KeyPath) -> type[BaseModel]:
    model = root
    for part in path:
        for name, info in model.model_fields.items():
            if part in (name, info.alias):
                model = _inner_model(info.annotation) or model
    return model


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _inner_model(part))), None)


def _sections(root: type[BaseModel], above: str = "") -> list[tuple[str, type[BaseModel]]]:
    """Every mapping inside the job file with its dotted name."""
    found = []
    for name, info in root.model_fields.items():
        model = _inner_model(info.annotation)
        if model is not None:
            found += [(above + name, model), *_sections(model, f"{above}{name}.")]
    return found
