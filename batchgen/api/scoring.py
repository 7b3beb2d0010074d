"""Scoring: how likely a model finds given continuations of prompts, by the log probabilities of a prompt."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from batchgen.api.prompt_forms import Read
from batchgen.engine.messages import pack_ids, unpack_ids
from batchgen.errors import ConfigError
from batchgen.outputs import RequestOutput, ScoreOutput
from batchgen.quantities import counted
from batchgen.sampling_params import SamplingParams

# Prompts that are looked at together: few enough that the blocks of the first are still cached for the rest.
_STRETCH = 64


class Pair(NamedTuple):
    """A prompt with a continuation as token ids; the continuation begins at `start`."""

    ids: list[int]
    start: int

    @property
    def params(self) -> SamplingParams:
        """Scores of the continuation's tokens alone, so that the prompt may come from the prefix cache."""
        return SamplingParams(
            temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=0, prompt_logprob_start=self.start
        )

    @property
    def prompt(self) -> Read:
        """What the engine is asked."""
        return Read(None, pack_ids(self.ids))


def make_pairs(
    prompts: Sequence[Read], continuations: Sequence[Read], encode: Callable[..., list[int]]
) -> list[Pair]:
    """One pair for each continuation; a single prompt is that of all of them.

    Two texts are encoded as one, because a model reads them so. Should a token reach over the seam, it
    belongs to the continuation. Token ids are put together as they are.

    Raises:
        ConfigError: another number of prompts than continuations; an empty one.
    """
    if len(prompts) == 1:
        prompts = [*prompts] * len(continuations)
    if len(prompts) != len(continuations):
        raise ConfigError(
            f"{counted(len(prompts), 'prompt')} for {counted(len(continuations), 'continuation')}; give one "
            f"prompt for all, or one each"
        )
    pairs = []
    for number, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True)):
        pair = _pair(prompt, continuation, encode)
        if pair.start == 0 and prompt.text:
            both = f"{prompt.text}{continuation.text or ''}"
            raise ConfigError(
                f"pair {number}: the first token of {both!r:.60} reaches from prompt to continuation; "
                f"a score needs a token before it: begin the continuation with a space, or give token ids"
            )
        if pair.start == 0 or pair.start == len(pair.ids):
            what = "prompt" if pair.start == 0 else "continuation"
            raise ConfigError(f"pair {number}: the {what} has no tokens; a score needs at least one of both")
        pairs.append(pair)
    return pairs


def _pair(prompt: Read, continuation: Read, encode: Callable[..., list[int]]) -> Pair:
    if prompt.ids is None and continuation.ids is None:
        first, both = encode(prompt.text), encode(f"{prompt.text}{continuation.text}")
        start = 0
        while start < min(len(first), len(both)) and first[start] == both[start]:
            start += 1
        return Pair(both, start)
    first = encode(prompt.text) if prompt.ids is None else unpack_ids(prompt.ids)
    rest = (
        encode(continuation.text, add_special_tokens=False)
        if continuation.ids is None
        else unpack_ids(continuation.ids)
    )
    return Pair(first + rest, len(first))


def score_pairs(
    pairs: Sequence[Pair],
    run: Callable[[Sequence[Read], Sequence[SamplingParams]], Sequence[RequestOutput]],
) -> list[ScoreOutput]:
    """The score of each pair, by way of `run`, which generates for prompts with a parameter set each."""
    found: dict[int, ScoreOutput] = {}
    for numbers in waves(pairs):
        outputs = run([pairs[each].prompt for each in numbers], [pairs[each].params for each in numbers])
        for number, output in zip(numbers, outputs, strict=True):
            found[number] = _score_output(pairs[number], output)
    return [found[number] for number in range(len(pairs))]


def waves(pairs: Sequence[Pair]) -> Iterable[list[int]]:
    """The pairs' numbers in batches: of a prompt that several share, the first alone, then the others.

    The first leaves the prompt's blocks in the prefix cache, where the others find them.
    """
    by_prompt: dict[bytes, list[int]] = {}
    for number, pair in enumerate(pairs):
        by_prompt.setdefault(pack_ids(pair.ids[: pair.start]), []).append(number)
    groups = list(by_prompt.values())
    for begin in range(0, len(groups), _STRETCH):
        stretch = groups[begin : begin + _STRETCH]
        yield [group[0] for group in stretch]
        if rest := [number for group in stretch for number in group[1:]]:
            yield rest


def _score_output(pair: Pair, output: RequestOutput) -> ScoreOutput:
    """What the engine said of a pair."""
    given, continuation = pair.ids[: pair.start], pair.ids[pair.start :]
    if output.error is not None or output.prompt_logprobs is None:
        return ScoreOutput(given, continuation, [], float("nan"), False, 0, output.error)
    found = [
        (position or {})[token]
        for position, token in zip(output.prompt_logprobs[pair.start :], continuation, strict=True)
    ]
    values = [entry.logprob for entry in found]
    return ScoreOutput(
        prompt_token_ids=given,
        token_ids=continuation,
        token_logprobs=values,
        logprob=sum(values),
        is_greedy=all(entry.rank == 1 for entry in found),
        num_cached_tokens=output.num_cached_tokens,
    )
