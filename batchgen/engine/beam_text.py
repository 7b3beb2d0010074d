"""BeamTexts: the texts of a search's beams, for stop strings, which end a beam as an id does. No torch."""

from array import array
from copy import copy

from batchgen.engine.detokenizer import Decoder, Detokenizer, StopStrings
from batchgen.sampling_params import SamplingParams


class BeamTexts:
    """Looks for stop strings in every continuation that ranks high enough to matter.

    Args:
        params: of the request.
        decoder: makes text of token ids.
        num_prompt_tokens: ids of a beam that are not looked at.
    """

    def __init__(self, params: SamplingParams, decoder: Decoder, num_prompt_tokens: int):
        self._min_tokens = params.min_tokens
        self._stops = StopStrings(params.stop)
        self._num_prompt_tokens = num_prompt_tokens
        self._empty = Detokenizer(
            decoder,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        # Beams of the step before, and continuations looked at in this one: ids -> text so far.
        self._known: dict[bytes, Detokenizer] = {}
        self._grown: dict[bytes, Detokenizer] = {}

    def stop(self, token_ids: "array[int]", token: int) -> str | None:
        """The stop string that is complete when `token` follows a beam; None if none is."""
        generated = token_ids[self._num_prompt_tokens :]
        text = copy(self._text(generated))
        text.ids = text.ids.copy()
        num_known = len(text.text)
        text.append(token)
        generated.append(token)
        self._grown[generated.tobytes()] = text
        if len(generated) <= self._min_tokens:
            return None
        match = self._stops.find(text.text, num_known)
        return None if match is None else match.stop

    def next_step(self) -> None:
        """Forget the beams of the last step; those of the next are among their continuations."""
        self._known, self._grown = self._grown, {}

    def _text(self, generated: "array[int]") -> Detokenizer:
        text = self._known.get(generated.tobytes())
        if text is None:
            text = copy(self._empty)
            text.ids = []
            for token in generated:
                text.append(token)
        return text
