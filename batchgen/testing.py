"""What tests of batchgen and of code built on it need: doubles of a tokenizer and of engines."""

from batchgen.byte_tokenizer import ByteTokenizer
from batchgen.counting import CountingExecutor, counting_token
from batchgen.echo import EchoEngine, EchoOptions

__all__ = [
    "ByteTokenizer",
    "CountingExecutor",
    "EchoEngine",
    "EchoOptions",
    "counting_token",
]
