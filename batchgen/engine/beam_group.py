"""BeamGroups: beam searches among the groups of the scheduler. No torch.

The sequences of a group are the open beams, best first; all run in the same steps. A beam that goes on with
several tokens is forked: the others share its blocks, and the first to write into the last, partly filled one
gets a copy. A beam that does not go on gives its blocks back at once. The indices that no beam has stand in
`pending`, so a group is always as wide as its search. Nothing is told before the end.
"""

from array import array
from collections.abc import Callable

from batchgen.engine.beam import BeamSearch, Candidates, Continuation, Hypothesis
from batchgen.engine.beam_text import BeamTexts
from batchgen.engine.detokenizer import Decoder
from batchgen.engine.group import Group
from batchgen.engine.messages import SampleOutput
from batchgen.engine.metrics import Counters
from batchgen.engine.request import Request
from batchgen.engine.request_table import RequestTable
from batchgen.engine.scheduler_output import DrawRules
from batchgen.engine.sequence import Sequence
from batchgen.engine.stop import Stop, stop_by_token
from batchgen.outputs import FinishReason

# Rules and drawn tokens -> whether the grammar may end after them.
Accepts = Callable[[DrawRules, "array[int]"], bool]


class Beams:
    """What a group is besides its sequences when it is a beam search."""

    __slots__ = ("request", "search", "texts")

    def __init__(self, request: Request, decoder: Callable[[], Decoder] | None):
        params, num_prompt_tokens = request.params, len(request.prompt)
        self.request = request
        self.search = BeamSearch(
            params.num_samples,
            request.max_total_tokens - num_prompt_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            num_stop_ids=len(request.rules.stop_ids),
            has_stop_strings=bool(params.stop),
            num_logprobs=params.logprobs,
        )
        self.texts: BeamTexts | None = None
        if params.stop:
            assert decoder is not None
            self.texts = BeamTexts(params, decoder(), num_prompt_tokens)

    @property
    def num_candidates(self) -> int:
        """Likeliest tokens that each beam needs for the next step."""
        return self.search.num_candidates

    def step(self, beams: list[Sequence], candidates: list[Candidates]) -> list[Continuation]:
        """Take in the candidates of every open beam; gives those of the next step, none at the end."""
        going = self.search.advance(beams, candidates, lambda parent, token: self._ends(beams[parent], token))
        if self.texts is not None:
            self.texts.next_step()
        return going

    def _ends(self, beam: Sequence, token: int) -> Stop | None:
        stop = stop_by_token(self.request, token, len(beam.token_ids) + 1)
        if self.texts is not None:
            string = self.texts.stop(beam.token_ids, token)
            if string is not None and (stop is None or stop.finish_reason is FinishReason.LENGTH):
                return Stop(FinishReason.STOP, string)
        return stop


class BeamGroups:
    """Continues the beam searches of a table's groups, and tells what they found."""

    def __init__(self, table: RequestTable, counters: Counters, accepts: Accepts | None):
        self._table = table
        self._accepts = accepts
        self._counters = counters

    def advance(self, group: Group, candidates: list[tuple[Sequence, Candidates]]) -> None:
        """Take in the candidates of all beams of a group that is not finished; not all have none."""
        state = group.beam
        assert isinstance(state, Beams)
        beams = [sequence for sequence, _ in candidates]
        self._counters.generation_tokens += len(beams)
        going = state.step(beams, [each for _, each in candidates])
        if going:
            self._go_on(group, beams, going)
        else:
            self._tell(group.request, state.search)
            self._table.end(group.request)

    def _go_on(self, group: Group, beams: list[Sequence], going: list[Continuation]) -> None:
        """Let the beams of the next step take the place of those of the last."""
        survivors = {each.parent for each in going}
        dropped = [beam for place, beam in enumerate(beams) if place not in survivors]
        free_indices = group.pending + [beam.index for beam in dropped]
        taken: set[int] = set()
        following: list[Sequence] = []
        for each in going:
            beam = beams[each.parent]
            if each.parent in taken:
                beam = self._table.fork_beam(beam, free_indices.pop(0))
            taken.add(each.parent)
            following.append(beam)
        for beam in dropped:
            self._table.drop_beam(beam)
        for beam, each in zip(following, going, strict=True):
            beam.token_ids.append(each.token)
            if each.logprobs is not None:
                beam.logprobs.append(each.logprobs)
        group.sequences[:] = following
        group.pending = free_indices

    def _tell(self, request: Request, search: BeamSearch) -> None:
        """Say what was found, the best first."""
        for index, found in enumerate(search.finished):
            self._table.outbox.put(
                SampleOutput(
                    request_id=request.request_id,
                    index=index,
                    token_ids=found.token_ids.tobytes(),
                    finish_reason=found.stop.finish_reason,
                    stop_reason=found.stop.stop_reason,
                    num_cached_tokens=request.num_cached_tokens,
                    serial=request.source.serial,
                    logprobs=None if request.params.logprobs is None else tuple(found.logprobs),
                    prompt_logprobs=request.take_prompt_logprobs(),
                    valid=self._is_valid(request, found),
                    cumulative_logprob=found.logprob,
                    times=request.times,
                )
            )

    def _is_valid(self, request: Request, found: Hypothesis) -> bool | None:
        """Whether a finished beam conforms to its grammar; None without one."""
        if request.params.structured_outputs is None:
            return None
        # A mask lets the end of the text through only where the grammar may end.
        is_ended = found.stop == Stop(FinishReason.STOP)
        return is_ended or (self._accepts is not None and self._accepts(request.rules, found.token_ids))
