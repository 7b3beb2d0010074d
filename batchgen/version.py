"""The version of batchgen, from the installed package's metadata."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("batchgen")
except PackageNotFoundError:
    __version__ = "0+checkout"
