"""Sequence: one token stream of a request, how far it is computed, and the blocks that hold it."""

from array import array
from typing import TYPE_CHECKING

from batchgen.engine.request import Request
from batchgen.engine.scheduler_output import TokenLogprobs

if TYPE_CHECKING:
    from batchgen.engine.group import Group


class Sequence:
    """One sample of a request.

    Attributes:
        seq_id: unique in the engine's life.
        index: number of the sample in its request.
        group: those it runs with.
        token_ids: prompt and accepted tokens.
        num_placeholders: tokens that a step under way draws; they follow `token_ids` and are not known yet.
        num_computed_tokens: tokens whose keys and values are in the blocks, or will be after the steps under
            way.
        block_tables: per KV group, the sequence's blocks in order; -1 where one behind a window was released.
        num_released: per KV group, how many leading blocks were released behind a window.
        host_tables: the same blocks in host memory while it is swapped out.
        block_hashes: chained hashes of its full blocks, as far as anybody asked.
        num_cached_blocks: leading blocks that were offered to the prefix cache.
        num_sent_tokens: generated tokens that the caller was told.
        logprobs: of the tokens not told yet, when the request wants them.
        is_valid: whether its grammar may end here; None without a grammar.
    """

    __slots__ = (
        "block_hashes",
        "block_tables",
        "group",
        "host_tables",
        "index",
        "is_finished",
        "is_valid",
        "logprobs",
        "num_cached_blocks",
        "num_computed_tokens",
        "num_placeholders",
        "num_released",
        "num_sent_tokens",
        "request",
        "seq_id",
        "token_ids",
    )

    def __init__(self, seq_id: int, request: Request, index: int, num_groups: int = 1):
        self.seq_id = seq_id
        self.request = request
        self.index = index
        self.group: Group
        self.token_ids = array("i", request.prompt)
        self.num_placeholders = 0
        self.num_computed_tokens = 0
        self.block_tables: tuple[list[int], ...] = tuple([] for _ in range(num_groups))
        self.num_released = [0] * num_groups
        self.host_tables: tuple[list[int], ...] = ()
        self.block_hashes: list[bytes] = []
        self.num_cached_blocks = 0
        self.num_sent_tokens = 0
        self.logprobs: list[TokenLogprobs] = []
        self.is_valid: bool | None = None
        self.is_finished = False

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

    def tokens_to_compute(self, count: int) -> list[int]:
        """The next `count` tokens that lack keys and values; -1 for those not known yet."""
        start = self.num_computed_tokens
        tokens = self.token_ids[start : start + count].tolist()
        if len(tokens) < count:
            tokens += [-1] * (count - len(tokens))
        return tokens
