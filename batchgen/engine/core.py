"""EngineCore: the loop that joins scheduler and executor, driven by one thread through few messages."""

import logging
import time
import weakref
from collections.abc import Iterable
from functools import cache, partial
from itertools import chain

from batchgen.config import EngineConfig, ModelSettings
from batchgen.engine.adapter_calls import AdapterCalls
from batchgen.engine.adapters import Adapters
from batchgen.engine.block_manager import BlockManager
from batchgen.engine.detokenizer import Decoder
from batchgen.engine.info import engine_info
from batchgen.engine.messages import EngineProfile, EngineRequest, EngineStats, Limits, SampleOutput
from batchgen.engine.metrics import snapshot
from batchgen.engine.policy import POLICIES
from batchgen.engine.pool_warning import warn_of_small_pool
from batchgen.engine.prefix_cache import cache_root
from batchgen.engine.profiling import Profiling
from batchgen.engine.request_table import RequestTable
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.speculation import Speculation
from batchgen.engine.watchdog import Watchdog
from batchgen.errors import BatchgenError, EngineError
from batchgen.outputs import FailureCode, RowFailure
from batchgen.worker.executor import Executor

log = logging.getLogger(__name__)

# How long an engine that waits for an adapter's files looks at nothing else.
_LOOK_S = 0.02


class EngineCore(AdapterCalls):
    """One engine: requests go in by `add`, `step` computes and gives back what is new.

    Args:
        config: as the caller wrote it; what was left to us is taken from the executor's `resolved`.
        executor: a loaded model.
        tokenizer_eos_ids: end-of-sequence ids of the tokenizer, joined with the model's own.
        load_s: how long loading took, for `info`.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        tokenizer_eos_ids: Iterable[int] = (),
        load_s: float = 0.0,
    ):
        loaded = executor.info
        resolved = {**config.to_engine_args(), **loaded.resolved}
        eos_token_ids = tuple(sorted({*loaded.eos_token_ids, *tokenizer_eos_ids}))
        self.executor = executor
        self.info = engine_info(config.model.model, loaded, resolved, eos_token_ids, load_s)
        self.is_paused = False
        self.is_asleep = False
        self._num_idle = 0
        self._profiling: Profiling | None = None
        self._tokenizer = cache(partial(_load_tokenizer, config.model))
        self._kv_dtype = str(resolved["kv_cache_dtype"])
        self._blocks = BlockManager(
            loaded.num_blocks,
            resolved["block_size"],
            group_windows=loaded.group_windows,
            num_cpu_blocks=loaded.num_cpu_blocks,
            enable_prefix_caching=resolved["enable_prefix_caching"],
        )
        memory = executor.adapters
        self._adapters = Adapters(None if memory is None else memory.drop)
        ngram = config.speculative.ngram
        self._scheduler = Scheduler(
            self._blocks,
            max_num_seqs=resolved["max_num_seqs"],
            max_num_batched_tokens=resolved["max_num_batched_tokens"],
            max_model_len=loaded.max_model_len,
            vocab_size=loaded.vocab_size,
            eos_token_ids=eos_token_ids,
            rank=POLICIES[resolved["scheduling_policy"]],
            enable_chunked_prefill=resolved["enable_chunked_prefill"],
            long_prefill_token_threshold=resolved["long_prefill_token_threshold"],
            delay_factor=resolved["delay_factor"],
            preemption_mode=resolved["preemption_mode"],
            block_bytes=loaded.block_bytes,
            speculation=None if ngram is None else Speculation(ngram),
            decoder=self._tokenizer,
            accepts=executor.accepts,
            continues=loaded.continues,
            adapters=memory,
            max_loras=None if memory is None else resolved["max_loras"],
        )
        # The watching thread must not keep the model alive: it knows only the table of requests.
        self._watchdog = Watchdog(partial(_describe_running, self._scheduler.table))
        weakref.finalize(self, self._watchdog.stop)
        log.info("end-of-sequence ids: %s", ", ".join(map(str, eos_token_ids)) or "none")
        warn_of_small_pool(self.info, self._blocks)

    @property
    def has_work(self) -> bool:
        """Whether `step` could do something: a request is unfinished, and the engine not paused or asleep."""
        return not (self.is_paused or self.is_asleep) and self._scheduler.has_work

    def add(self, request: EngineRequest) -> None:
        """Queue a request. One that can never run is answered by the next `step` with a row failure."""
        request, failure = self._with_adapter(request)
        failure = failure or self._refusal(request)
        root = cache_root(
            adapter_hash=b"" if failure or request.adapter is None else bytes.fromhex(request.adapter),
            cache_salt=request.cache_salt,
            features=request.features,
            kv_dtype=self._kv_dtype,
        )
        self._scheduler.add(request, root, failure)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests: nothing more is heard of them. Unknown or finished ids are ignored."""
        for request_id in request_ids:
            self._scheduler.table.drop(request_id)

    def abort_samples(self, samples: Iterable[tuple[str, int]]) -> None:
        """Drop single samples, given as (request id, index); the caller has seen enough of them."""
        for request_id, index in samples:
            self._scheduler.table.drop_sample(request_id, index)

    def set_limits(self, limits: Limits) -> None:
        """Change limits from the next step on."""
        self._scheduler.set_limits(limits)

    def pause(self) -> None:
        """Compute nothing until `resume`; what is in flight keeps its blocks."""
        self.is_paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        self.is_paused = False

    def sleep(self, level: int = 1) -> None:
        """Give memory back: 1 drops KV blocks and moves weights to host memory, 2 drops both.

        Requests in flight wait, with the tokens drawn so far; `wake_up` lets them be computed anew.

        Raises:
            BatchgenError: as the executor's `sleep`; for a level that there is not.
        """
        try:
            self.executor.sleep(level)
            self.is_asleep = True
        finally:
            # What blocks held is lost, or nobody knows.
            self._scheduler.abandon_steps()

    def wake_up(self) -> None:
        """Be ready again after `sleep`; nothing is cached then."""
        self.executor.wake_up()
        self.is_asleep = False

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks and end all pins. Requests in flight keep the blocks they use; always True."""
        self._scheduler.reset_prefix_cache()
        return True

    def unpin_prefix(self, request_id: str) -> bool:
        """Let the blocks go that a pinned request keeps; False if it keeps none, or none any longer."""
        return self._scheduler.pins.unpin(request_id)

    def stats(self, with_block_map: bool = False) -> EngineStats:
        """The numbers of this moment."""
        return snapshot(
            self._scheduler, is_paused=self.is_paused or self.is_asleep, with_block_map=with_block_map
        )

    def begin_profile(self) -> None:
        """Keep time from the next step on."""
        self._profiling = Profiling(self.executor, self._scheduler.counters)

    def end_profile(self) -> EngineProfile:
        """Where the time went since `begin_profile`.

        Raises:
            EngineError: there was none.
        """
        profiling, self._profiling = self._profiling, None
        if profiling is None:
            raise EngineError("end_profile comes after begin_profile")
        return profiling.end()

    def step(self) -> list[SampleOutput]:
        """Compute one step and tell what is new.

        Raises:
            BaseException: whatever the executor raises, an interrupt included. The step is then forgotten,
                and those who ran are recomputed by the following steps.
        """
        if self._profiling is None:
            return self._step()
        with self._profiling.step():
            return self._step()

    def _step(self) -> list[SampleOutput]:
        if self.is_paused or self.is_asleep:
            return self._scheduler.take_outputs()
        plan = self._scheduler.schedule()
        if plan.is_empty:
            outputs = self._scheduler.take_outputs()
            if not outputs and self.executor.adapters is not None and self.executor.adapters.wait(_LOOK_S):
                return outputs
            self._num_idle += 1
            # One empty step may only have made room for the next.
            if self._num_idle > 2 and not outputs and self._scheduler.has_work:
                outputs = self._fail_stuck()
            return outputs
        self._num_idle = 0
        started = time.perf_counter()
        self._watchdog.begin()
        try:
            result = self.executor.execute(plan)
        except BaseException:
            self._scheduler.abandon_steps()
            raise
        finally:
            self._watchdog.end()
        outputs = self._scheduler.update(result)
        self._scheduler.step_ended(plan, result, time.perf_counter() - started)
        self._drop_adapters()
        return outputs

    def shutdown(self) -> None:
        """Free the model. May be called twice."""
        self._watchdog.stop()
        self.executor.shutdown()

    def _refusal(self, request: EngineRequest) -> RowFailure | None:
        """Why this engine cannot do what a request asks, whatever its prompt; None if it can."""
        params = request.params
        if request.features:
            return RowFailure(FailureCode.INVALID_PARAMETER, "features are not built yet; leave them out")
        if request.is_pinned and not self._blocks.enable_prefix_caching:
            return RowFailure(
                FailureCode.INVALID_PARAMETER, "a prefix can be pinned only with enable_prefix_caching: true"
            )
        if params.use_beam_search and params.stop and (failure := self._cannot_decode()):
            return failure
        reason = self.executor.refusal(params)
        return None if reason is None else RowFailure(FailureCode.INVALID_PARAMETER, reason)

    def _cannot_decode(self) -> RowFailure | None:
        """Why stop strings cannot be looked for here; None if they can, with the tokenizer loaded."""
        try:
            self._tokenizer()
        except (BatchgenError, OSError, ValueError) as error:
            return RowFailure(
                FailureCode.INVALID_PARAMETER, f"stop strings of a beam search need the tokenizer: {error}"
            )
        return None

    def _fail_stuck(self) -> list[SampleOutput]:
        """End the request for which nothing can be scheduled though nothing is under way."""
        table, pool = self._scheduler.table, self._blocks.pool
        head = next(chain(table.waiting, table.swapped, table.running), None)
        if head is None:
            raise EngineError(f"requests {list(table.requests)[:5]} are in no queue")
        needed = self._blocks.blocks_for_group(head, 1)
        message = (
            f"request {head.request.request_id} cannot move: it needs {needed} blocks, "
            f"{pool.num_free} of {pool.num_blocks} are free, {len(table.running)} requests run, "
            f"{len(table.waiting)} wait, {len(table.swapped)} are swapped out"
        )
        log.error("%s; it is given up", message)
        table.fail(head.request, RowFailure(FailureCode.ENGINE_ERROR, message))
        return self._scheduler.take_outputs()


def _load_tokenizer(settings: ModelSettings) -> Decoder:
    # Most engines never need it: texts are the caller's.
    from batchgen.tokenizer import tokenizer_of

    return tokenizer_of(settings)


def _describe_running(table: RequestTable) -> str:
    running = table.running.copy()
    names = ", ".join(group.request.request_id for group in running[:5])
    return f"{len(running)} requests: {names}{' …' if len(running) > 5 else ''}"
