"""Registry: name -> thing, filled from the files of a package on first lookup."""

import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Generic, TypeVar

from batchgen.errors import UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """Things of one kind by name; a new entry is one new file in the registry's package.

    Args:
        what: the kind of thing, for messages ("source", "model architecture").
        package: dotted name of the package whose files register entries. They are imported on the
            first lookup, so they must be cheap to import: heavy libraries belong inside functions.
    """

    def __init__(self, what: str, package: str):
        self.what = what
        self._package = package
        self._entries: dict[str, T] = {}
        self._filled = False

    def register(self, *names: str) -> Callable[[T], T]:
        """Decorator: enter the thing under each name. The same name twice is an error."""

        def enter(thing: T) -> T:
            for name in names:
                if name in self._entries:
                    raise ValueError(f"{self.what} {name!r} is registered twice")
                self._entries[name] = thing
            return thing

        return enter

    def get(self, name: str, path: str = "") -> T:
        """The thing of that name; UnknownNameError lists the nearest one."""
        self._fill()
        if name not in self._entries:
            raise UnknownNameError(self.what, name, self._entries, path)
        return self._entries[name]

    def names(self) -> list[str]:
        """All names, sorted."""
        self._fill()
        return sorted(self._entries)

    def __contains__(self, name: str) -> bool:
        self._fill()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _fill(self) -> None:
        if self._filled:
            return
        self._filled = True
        package = import_module(self._package)
        for module in pkgutil.iter_modules(package.__path__):
            import_module(f"{self._package}.{module.name}")
