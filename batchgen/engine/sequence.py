"""Sequence: one token stream of a request, how far it is computed, and the blocks that hold it."""

from array import array
from enum import Enum, auto

from batchgen.engine.request import Request


class SequenceState(Enum):
    """Where a sequence stands."""

    WAITING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    FINISHED = auto()


class Sequence:
    """One sample of a request.

    Attributes:
        seq_id: unique in the engine's life.
        index: number of the sample in its request.
        order: place in every queue; smaller goes first, the largest is the first to be preempted.
        token_ids: prompt and accepted tokens.
        num_placeholders: tokens that a step under way draws; they follow `token_ids` and are not known yet.
        num_computed_tokens: tokens whose keys and values are in the blocks, or will be after the steps under
            way.
        block_tables: per KV group, the sequence's blocks in order.
        block_hashes: chained hashes of its full blocks, as far as anybody asked.
        num_cached_blocks: leading blocks that were offered to the prefix cache.
    """

    __slots__ = (
        "block_hashes",
        "block_tables",
        "index",
        "num_cached_blocks",
        "num_computed_tokens",
        "num_placeholders",
        "num_preemptions",
        "num_sent_tokens",
        "order",
        "request",
        "seq_id",
        "state",
        "token_ids",
    )

    def __init__(self, seq_id: int, request: Request, index: int, num_groups: int = 1):
        self.seq_id = seq_id
        self.request = request
        self.index = index
        self.order: tuple[int, ...] = ()
        self.token_ids = array("i", request.prompt)
        self.num_placeholders = 0
        self.num_computed_tokens = 0
        self.block_tables: tuple[list[int], ...] = tuple([] for _ in range(num_groups))
        self.block_hashes: list[bytes] = []
        self.num_cached_blocks = 0
        self.num_preemptions = 0
        self.num_sent_tokens = 0
        self.state = SequenceState.WAITING

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, those that a step under way draws included."""
        return len(self.token_ids) + self.num_placeholders

    @property
    def num_generated(self) -> int:
        """Tokens drawn, those not known yet included."""
        return len(self.token_ids) + self.num_placeholders - len(self.request.prompt)

    @property
    def is_finished(self) -> bool:
        """Whether nothing more is computed for it."""
        return self.state is SequenceState.FINISHED

    def tokens_to_compute(self, count: int) -> list[int]:
        """The next `count` tokens that lack keys and values; -1 for those not known yet."""
        start = self.num_computed_tokens
        tokens = self.token_ids[start : start + count].tolist()
        if len(tokens) < count:
            tokens += [-1] * (count - len(tokens))
        return tokens
