"""From the core's TokenLogprobs to what callers see: mappings with the tokens' texts."""

from collections.abc import Iterable

from batchgen.engine.detokenizer import Decoder
from batchgen.engine.scheduler_output import TokenLogprobs
from batchgen.logprobs import FlatLogprobs, Logprob, Logprobs, PositionLogprobs, PromptLogprobs


class TokenTexts:
    """The text of single tokens, each decoded once."""

    def __init__(self, decoder: Decoder):
        self._decoder = decoder
        self._texts: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        """The token's own text, control tokens spelled out; what is half a character becomes U+FFFD."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._decoder.decode([token], skip_special_tokens=False)
        return text


def position_logprobs(told: TokenLogprobs, texts: TokenTexts | None) -> PositionLogprobs:
    """One position. A token that is told twice, as the one that stands there and as a likely one, is once in.

    Args:
        told: by the core.
        texts: None leaves the texts out.
    """
    found: PositionLogprobs = {}
    for token, value, rank in zip(told.ids, told.values, told.ranks, strict=True):
        if token not in found:
            found[token] = Logprob(value, rank, None if texts is None else texts[token])
    return found


def new_logprobs(is_flat: bool) -> Logprobs:
    """An empty list of positions, in the form asked for."""
    return FlatLogprobs() if is_flat else []


def prompt_logprobs(
    told: Iterable[TokenLogprobs], start: int, texts: TokenTexts | None, is_flat: bool
) -> PromptLogprobs:
    """The positions of a prompt: None before position `start`, of which `told` has the first."""
    found: PromptLogprobs = FlatLogprobs() if is_flat else []
    for _ in range(start):
        found.append(None)
    for each in told:
        found.append(position_logprobs(each, texts))
    return found
