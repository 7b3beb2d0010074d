"""DrawLimits: what a loaded model can draw at all, and why not."""

from dataclasses import dataclass
from typing import Any

from batchgen.errors import ConfigError
from batchgen.sampling_checks import check_engine_limits
from batchgen.sampling_params import SamplingParams
from batchgen.structured.masks import GrammarMasks
from batchgen.worker.thinking import ThinkingMarks


@dataclass(frozen=True, slots=True)
class DrawLimits:
    """The limits of one model under one set of settings.

    Args:
        vocab_size: ids from here on have no token.
        marks: of thinking sections, or why the model has none.
        grammar: of structured outputs.
    """

    vocab_size: int
    marks: ThinkingMarks | str
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
        if params.thinking_token_budget is not None:
            if isinstance(self.marks, str):
                return f"thinking_token_budget: {self.marks}"
            if params.structured_outputs is not None:
                return (
                    "thinking_token_budget does not go together with structured_outputs, which say every "
                    "token of the text; leave one out"
                )
        return self.grammar.refusal(params)
