"""DrawLimits: what a loaded model can draw at all, and why not."""

from dataclasses import dataclass
from typing import Any

from batchgen.errors import ConfigError
from batchgen.sampling_checks import check_engine_limits
from batchgen.sampling_params import SamplingParams
from batchgen.structured.masks import GrammarMasks


@dataclass(frozen=True, slots=True)
class DrawLimits:
    """The limits of one model under one set of settings.

    Args:
        vocab_size: ids from here on have no token.
        grammar: of structured outputs.
    """

    vocab_size: int
    grammar: GrammarMasks

    def refusal(self, params: SamplingParams, info: Any) -> str | None:
        """Why a request with these parameters cannot be drawn, naming the parameter; None if it can.

        Args:
            params: right by themselves.
            info: the ExecutorInfo.
        """
        try:
            check_engine_limits(params, info)
        except ConfigError as error:
            return str(error)
        allowed = params.allowed_token_ids
        if allowed is not None and min(allowed) >= self.vocab_size:
            return (
                f"allowed_token_ids: none of them has a token; the tokenizer's ids end at "
                f"{self.vocab_size - 1}"
            )
        return self.grammar.refusal(params)
