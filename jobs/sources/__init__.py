"""Sources: Parquet, JSON lines, CSV, Arrow, text and Hugging Face datasets as rows in a fixed order."""

from batchgen.jobs.sources.base import Source
from batchgen.jobs.sources.identity import SourceFile
from batchgen.jobs.sources.open import open_source

__all__ = ["Source", "SourceFile", "open_source"]
