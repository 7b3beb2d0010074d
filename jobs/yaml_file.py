"""A YAML 1.2 file as plain values, with the place and the written text of every value kept for messages."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from batchgen.errors import ConfigError

KeyPath = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"
# Only the types of YAML 1.2's core schema; a date is text, as that schema says.
_TEXT_TAGS = frozenset({_TAG + "str", _TAG + "timestamp"})
_NUMBER_TAGS = frozenset({_TAG + "int", _TAG + "float"})
_CONSTANT_TAGS = frozenset({_TAG + "bool", _TAG + "null"})
# What the parser says of `model: echo:`, for one.
_COLON = "mapping values are not allowed here"
_OLD_VERSION = re.compile(r"^%YAML\s+(?!1\.2\b)", re.MULTILINE)


@dataclass(slots=True)
class YamlDocument:
    """Plain values, and where each came from.

    Args:
        name: the file as the user named it.
        data: dicts, lists, str, int, float, bool and None.
        places: path of keys -> "job.yaml:12" or "--set sampling.n=2".
        written: path of keys -> the scalar as it was typed, such as "0123" for 123.
    """

    name: str
    data: Any = None
    places: dict[KeyPath, str] = field(default_factory=dict)
    written: dict[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """Where that value, or else the closest mapping around it, stands."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return self.name

    def put(self, path: KeyPath, other: "YamlDocument", place: str) -> None:
        """Set the value at `path` to another document's; mappings that lack are made.

        Raises:
            ConfigError: something on the way is not a mapping.
        """
        if not isinstance(self.data, dict):
            self.data = {}
        level = self.data
        for depth, key in enumerate(path[:-1]):
            if level.get(key) is None:
                level[key] = {}
                self.places.setdefault(path[: depth + 1], place)
            level = level[key]
            if not isinstance(level, dict):
                above = ".".join(map(str, path[: depth + 1]))
                raise ConfigError(f"{place}: {above} is {level!r} in {self.name}, which has no keys to set")
        level[path[-1]] = other.data
        for notes in (self.places, self.written):
            for known in [known for known in notes if known[: len(path)] == path]:
                del notes[known]
        self.places[path] = place
        self.written.update({path + inner: text for inner, text in other.written.items()})


def read_yaml(path: Path, name: str) -> YamlDocument:
    """Read a YAML file.

    Raises:
        ConfigError: no such file, not UTF-8, or not YAML 1.2; see `parse_yaml`.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 (byte {error.start}); save the file as UTF-8") from None
    return parse_yaml(text, name)


def parse_yaml(text: str, name: str) -> YamlDocument:
    """Parse YAML 1.2 text.

    Raises:
        ConfigError: a syntax error, a key given twice, a tag, a value that holds itself, more than one
            document, or a directive for another YAML version; with file and line.
    """
    if _OLD_VERSION.search(text):
        raise ConfigError(f"{name}: only YAML 1.2 is read; remove the %YAML line")
    yaml = YAML(typ="safe", pure=True)
    document = YamlDocument(name)
    try:
        root = yaml.compose(text)
        if root is not None:
            document.data = _Reader(yaml, document).value(root, (), ())
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}" if mark else name
        hint = "; text that holds a colon needs quotes" if error.problem == _COLON else ""
        raise ConfigError(f"{place}: {error.problem or error.context}{hint}") from None
    except YAMLError as error:
        raise ConfigError(f"{name}: {str(error).strip().splitlines()[0]}") from None
    return document


class _Reader:
    """Turns composed nodes into plain values and notes where they stood."""

    def __init__(self, yaml: YAML, document: YamlDocument):
        self._yaml = yaml
        self._document = document

    def value(self, node: Node, path: KeyPath, above: tuple[int, ...]) -> Any:
        if id(node) in above:
            raise self._error(node, "a value that holds itself")
        above = (*above, id(node))
        if isinstance(node, MappingNode):
            return self._mapping(node, path, above)
        if isinstance(node, SequenceNode):
            if node.tag != _TAG + "seq":
                raise self._error(node, f"unknown tag {_short(node.tag)}")
            items = []
            for position, item in enumerate(node.value):
                self._note(item, (*path, position))
                items.append(self.value(item, (*path, position), above))
            return items
        return self._scalar(node, path)

    def _mapping(self, node: MappingNode, path: KeyPath, above: tuple[int, ...]) -> dict[Any, Any]:
        if node.tag != _TAG + "map":
            raise self._error(node, f"unknown tag {_short(node.tag)}")
        values: dict[Any, Any] = {}
        first_line: dict[Any, int] = {}
        merged: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                for part in self._merge_parts(value_node):
                    merged = self.value(part, path, above) | merged
                continue
            if not isinstance(key_node, ScalarNode):
                raise self._error(key_node, "a key must be a plain word")
            key = self._scalar(key_node, None)
            line = key_node.start_mark.line + 1
            if key in first_line:
                raise self._error(key_node, f"key {key!r} is given twice; first on line {first_line[key]}")
            first_line[key] = line
            self._note(key_node, (*path, key))
            values[key] = self.value(value_node, (*path, key), above)
        return merged | values

    def _merge_parts(self, node: Node) -> list[MappingNode]:
        parts: list[Any] = node.value if isinstance(node, SequenceNode) else [node]
        for part in parts:
            if not isinstance(part, MappingNode):
                raise self._error(part, "'<<' merges mappings only")
        return parts

    def _scalar(self, node: Node, path: KeyPath | None) -> Any:
        if node.tag in _TEXT_TAGS:
            return str(node.value)
        if node.tag not in _NUMBER_TAGS | _CONSTANT_TAGS:
            raise self._error(node, f"unknown tag {_short(node.tag)}")
        if path is not None:
            self._document.written[path] = node.value
        return self._yaml.constructor.construct_object(node)

    def _note(self, node: Node, path: KeyPath) -> None:
        self._document.places[path] = f"{self._document.name}:{node.start_mark.line + 1}"

    def _error(self, node: Node, problem: str) -> ConfigError:
        return ConfigError(f"{self._document.name}:{node.start_mark.line + 1}: {problem}")


def _short(tag: str | None) -> str:
    tag = str(tag)
    return "!!" + tag.removeprefix(_TAG) if tag.startswith(_TAG) else tag
