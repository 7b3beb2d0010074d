"""The exceptions of batchgen.

BatchgenError
    ConfigError               a setting is wrong
        UnknownNameError      a name is not known; carries the nearest one
    InputError                the user's data or template is wrong
        SourceError           an input file, dataset or column
        TemplateError         a prompt template
    ModelError                a model cannot be loaded or run
        WeightsError          missing, extra or misshapen tensors
        UnsupportedModelError an architecture or feature that is not built
    KernelError               a kernel was called wrongly or cannot be had
        ShapeError
        DeviceError
    CapacityError             the machine lacks memory for what was asked
    EngineError               the engine process died or refused
    ResumeError               an existing output does not belong to this job, or is in use
    SinkError                 the output cannot be written

A message says what is wrong, where, the value, and what to do. A bad *row* is no exception: it is a
`batchgen.outputs.RowFailure`.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


class BatchgenError(Exception):
    """Everything that batchgen raises on purpose."""


class ConfigError(BatchgenError, ValueError):
    """A setting is wrong."""


class UnknownNameError(ConfigError):
    """A name is not known.

    Args:
        what: the kind of thing, as in "setting" or "model architecture".
        name: the name that was given.
        known: the names there are.
        path: where the name stood, such as "engine" or "job.yaml:12".
        instead: names of other tools -> what to do here (see `foreign_names`).
    """

    def __init__(
        self,
        what: str,
        name: str,
        known: Iterable[str],
        path: str = "",
        instead: Mapping[str, str] | None = None,
    ):
        self.name, self.known = name, sorted(known)
        self.nearest = nearest(name, self.known)
        place = f"{path}: " if path else ""
        if instead is not None and name in instead:
            super().__init__(f"{place}{what} {name!r} is not offered: {instead[name]}")
            return
        hint = f"; did you mean {self.nearest!r}?" if self.nearest else ""
        listed = "" if self.nearest else f"; known: {', '.join(self.known)}"
        super().__init__(f"{place}unknown {what} {name!r}{hint}{listed}")


class InputError(BatchgenError):
    """The user's data or template is wrong."""


class SourceError(InputError):
    """An input file, dataset or column is wrong."""


class TemplateError(InputError):
    """A prompt template is wrong."""


class ModelError(BatchgenError):
    """A model cannot be loaded or run."""


class WeightsError(ModelError):
    """Tensors are missing, unexpected or of the wrong shape."""


class UnsupportedModelError(ModelError):
    """An architecture or a feature of a model that is not built."""


class KernelError(BatchgenError):
    """A kernel was called wrongly or cannot be had."""


class ShapeError(KernelError):
    """Tensors whose shapes or dtypes disagree."""


class DeviceError(KernelError):
    """Tensors on different devices, or a device that is not there."""


class CapacityError(BatchgenError):
    """The machine lacks memory for what was asked."""


class EngineError(BatchgenError):
    """The engine process died or refused a message."""


class ResumeError(BatchgenError):
    """An existing output does not belong to this job, or another run holds it."""


class SinkError(BatchgenError):
    """The output cannot be written."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None when nothing comes close."""
    candidates = list(known)
    folded = {candidate.lower(): candidate for candidate in candidates}
    match = get_close_matches(name.lower(), list(folded), n=1, cutoff=0.6)
    return folded[match[0]] if match else None
