"""What tests of batchgen and of code built on it need: doubles of a tokenizer and of engines."""

from batchgen.byte_tokenizer import ByteTokenizer
from batchgen.counting import CountingExecutor, counting_token
from batchgen.echo import EchoEngine, EchoOptions
from batchgen.engine.step_times import MeasuredTimes

__all__ = [
    "ByteTokenizer",
    "CountingExecutor",
    "EchoEngine",
    "EchoOptions",
    "FreeDrafts",
    "counting_token",
]


class FreeDrafts(MeasuredTimes):
    """Step times by which a drafted token costs nothing, so that drafting does not depend on the machine."""

    def seconds(self, num_tokens: int) -> float:
        """A step takes a second, whatever its size."""
        return 1.0

    def more_s(self, num_tokens: int, most: int) -> float:
        """No token costs anything more."""
        return 0.0
