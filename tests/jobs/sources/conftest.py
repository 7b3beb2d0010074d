"""Fixtures for sources: open an input in the test's folder, and read it all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchgen.jobs.row import RowPosition
from batchgen.jobs.sections import InputSpec
from batchgen.jobs.sources import Source, open_source


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Source]:
    """Opens an `input` section given as keyword arguments; paths start from the test's folder."""

    def open_it(**section: Any) -> Source:
        return open_source(InputSpec.model_validate(section), tmp_path)

    return open_it


@pytest.fixture
def read_rows() -> Callable[..., list[tuple[int, int, int, dict[str, Any]]]]:
    """Reads (file, row, index, values) of every row from a position on, checking what batches promise."""

    def read(source: Source, file: int = 0, row: int = 0, index: int = 0) -> list[tuple[int, int, int, dict]]:
        rows = []
        for batch in source.batches(RowPosition(file, row, index)):
            assert batch.columns.schema.equals(source.schema)
            assert 0 < len(batch) <= 1024
            batch.columns.validate(full=True)
            for offset, values in enumerate(batch.columns.to_pylist()):
                start = batch.start
                rows.append((start.file, start.row + offset, start.index + offset, values))
        return rows

    return read


@pytest.fixture
def read_batches() -> Callable[[Source], list[Any]]:
    """All batches of a source."""
    return lambda source: list(source.batches(RowPosition(0, 0, 0)))
