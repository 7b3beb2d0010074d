"""Beam search for callers: BeamSearchParams in, BeamSearchOutput out; the search is the engine's."""

from collections.abc import Container

from batchgen.engine.detokenizer import Decoder
from batchgen.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    FinishReason,
    RequestOutput,
)
from batchgen.sampling_params import BeamSearchParams, SamplingParams


def beam_params(params: BeamSearchParams) -> SamplingParams:
    """The same search as SamplingParams.

    Raises:
        ConfigError: a value out of range; a temperature above 0.
    """
    return SamplingParams(
        use_beam_search=True,
        n=params.beam_width,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        ignore_eos=params.ignore_eos,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        structured_outputs=params.structured_outputs,
        skip_special_tokens=params.skip_special_tokens,
        logprobs=0,
    )


def beam_output(
    output: RequestOutput, params: BeamSearchParams, decoder: Decoder, end_ids: Container[int]
) -> BeamSearchOutput:
    """What the search found, in vLLM's form.

    Args:
        output: of `beam_params`.
        params: of the search.
        decoder: makes text of tokens.
        end_ids: end-of-sequence ids.
    """
    if output.error is not None:
        return BeamSearchOutput([], output.error)
    return BeamSearchOutput([_sequence(output, each, params, decoder, end_ids) for each in output.outputs])


def _sequence(
    output: RequestOutput,
    sample: CompletionOutput,
    params: BeamSearchParams,
    decoder: Decoder,
    end_ids: Container[int],
) -> BeamSearchSequence:
    ids = sample.token_ids
    has_end = sample.finish_reason == FinishReason.STOP and bool(ids) and ids[-1] in end_ids
    if has_end and not params.include_stop_str_in_output:
        ids = ids[:-1]
    tokens = [*output.prompt_token_ids, *ids]
    return BeamSearchSequence(
        tokens=tokens,
        text=decoder.decode(tokens, skip_special_tokens=params.skip_special_tokens),
        cum_logprob=sample.cumulative_logprob or 0.0,
        logprobs=sample.logprobs,
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        lora_request=output.lora_request,
        num_prompt_tokens=len(output.prompt_token_ids),
    )
