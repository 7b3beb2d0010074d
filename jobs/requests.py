"""RequestMaker: a row -> its request to the engine, or its result when it fails before."""

from dataclasses import replace

from batchgen.engine.messages import EngineRequest, pack_ids
from batchgen.jobs.prompts import PromptRenderer
from batchgen.jobs.row import Row, RowResult
from batchgen.jobs.window import Ready
from batchgen.outputs import RowFailure
from batchgen.sampling_params import SamplingParams


class RequestMaker:
    """Renders rows and packs them for the engine; called by several threads.

    Args:
        renderer: makes prompts of rows.
        params: of every request.
    """

    def __init__(self, renderer: PromptRenderer, params: SamplingParams):
        self._renderer = renderer
        # As the output's columns are made of them.
        self._params = replace(params, flat_logprobs=True)
        # Only a stop string must be looked for while tokens come.
        self._streams = bool(params.stop)

    def __call__(self, row: Row) -> Ready | RowResult:
        """The row's request, under its number as id; or its result, when there is nothing to run."""
        prompt = self._renderer.render(row)
        if isinstance(prompt, RowFailure):
            return RowResult(row, failure=prompt, warnings=row.batch.warnings.get(row.offset, ()))
        request = EngineRequest(
            request_id=str(row.index),
            prompt_token_ids=pack_ids(prompt.token_ids),
            params=self._params,
            seed=prompt.seed,
            streams=self._streams,
            adapter=prompt.adapter,
        )
        return Ready(row, request, len(prompt.token_ids), prompt.warnings)
