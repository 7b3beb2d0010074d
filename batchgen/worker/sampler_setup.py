"""make_sampler: the sampler of a model that is being loaded, and its limits."""

from collections.abc import Iterable

from batchgen.config import ModelSettings
from batchgen.kernels.ops import Kernels
from batchgen.structured.masks import GrammarMasks
from batchgen.tokenizer import Tokenizer
from batchgen.worker.draw_limits import DrawLimits
from batchgen.worker.sampler import Sampler
from batchgen.worker.thinking import ThinkingMarks


def make_sampler(
    settings: ModelSettings,
    kernels: Kernels,
    tokenizer: Tokenizer,
    vocab_size: int,
    eos_token_ids: Iterable[int],
    marks: ThinkingMarks | str,
) -> tuple[Sampler, DrawLimits]:
    """The sampler, and what it can do.

    Args:
        settings: of the model.
        kernels: of the model.
        tokenizer: ids without a token in it are never drawn.
        vocab_size: ids that are both the model's and the tokenizer's.
        eos_token_ids: every id that ends a text.
        marks: of thinking sections, or why the model has none.
    """
    grammar = GrammarMasks(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    sampler = Sampler(
        kernels,
        vocab_size,
        logprobs_mode=settings.logprobs_mode,
        marks=None if isinstance(marks, str) else marks,
        grammar=grammar,
    )
    return sampler, DrawLimits(vocab_size, grammar)
