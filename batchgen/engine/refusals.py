"""Which requests the engine refuses at once, and how it says so: a row failure, never an exception."""

from batchgen.engine.block_manager import BlockManager
from batchgen.engine.group import Group
from batchgen.engine.request import Request
from batchgen.engine.sequence import Sequence
from batchgen.errors import ConfigError
from batchgen.outputs import FailureCode, RowFailure
from batchgen.quantities import counted
from batchgen.sampling_checks import check_token_ids


def refusal(request: Request, *, max_model_len: int, vocab_size: int) -> RowFailure | None:
    """Why a request can never run on this model, whatever the memory; None if it can."""
    prompt, params = request.prompt, request.params
    if not prompt:
        return RowFailure(FailureCode.EMPTY_PROMPT, "the prompt has no tokens")
    if len(prompt) >= max_model_len:
        return RowFailure(
            FailureCode.PROMPT_TOO_LONG,
            f"the prompt has {counted(len(prompt), 'token')}; max_model_len is {max_model_len} and must "
            "leave room for one more",
        )
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < vocab_size:
            return RowFailure(
                FailureCode.TOKEN_OUT_OF_RANGE,
                f"prompt token id {token} at position {prompt.index(token)} is not in the model's vocabulary "
                f"(0 to {vocab_size - 1})",
            )
    try:
        check_token_ids(params, vocab_size)
    except ConfigError as error:
        return RowFailure(FailureCode.INVALID_PARAMETER, str(error))
    return None


def too_wide(request: Request, *, max_num_seqs: int, max_num_batched_tokens: int) -> RowFailure | None:
    """Why a beam search can never run under these limits: its beams compute their tokens together."""
    width = request.params.num_samples
    if not request.params.use_beam_search:
        return None
    for name, limit in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
        if width > limit:
            return RowFailure(
                FailureCode.INVALID_PARAMETER,
                f"a beam search of width {width} needs {name} of {width} or more; it is {limit}",
            )
    return None


def too_big(sequence: Sequence, blocks: BlockManager, needed: int | None = None) -> RowFailure:
    """The failure of a waiting sequence that needs more blocks than there are; `needed` by its group."""
    needed = needed or blocks.blocks_for(sequence.num_tokens)
    need = f"needs {counted(needed, 'block')}, pool has {blocks.num_blocks:,}"
    tokens = counted(sequence.num_tokens, "token")
    if sequence.num_generated:
        message = f"{need} (it grew to {tokens}). {_MORE_MEMORY}"
        return RowFailure(FailureCode.KV_CAPACITY, message)
    return RowFailure(FailureCode.NEVER_FITS, f"{need} ({tokens}). {_MORE_MEMORY}")


def outgrown(group: Group, blocks: BlockManager) -> RowFailure:
    """The failure of a running group that fills the whole pool alone and needs one more block."""
    leader = group.sequences[0]
    if len(group.sequences) > 1:
        needed = blocks.blocks_for_group(group, group.width)
        what = f"{group.width} beams of {counted(leader.num_tokens, 'token')}"
    else:
        needed = blocks.blocks_for(leader.num_computed_tokens + 1)
        what = f"it grew to {counted(leader.num_tokens, 'token')}"
    return RowFailure(
        FailureCode.KV_CAPACITY,
        f"needs {counted(max(needed, blocks.num_blocks + 1), 'block')}, pool has {blocks.num_blocks:,} "
        f"({what} while running alone). {_MORE_MEMORY}",
    )


def undrawable(sequence: Sequence, why: str) -> RowFailure:
    """The failure of a sequence whose sampling parameters allow no next token."""
    return RowFailure(
        FailureCode.INVALID_PARAMETER, f"generated token {sequence.num_generated + 1} cannot be drawn: {why}"
    )


def overflowed(sequence: Sequence) -> RowFailure:
    """The failure of a sequence for whose next token the model gave no finite logit."""
    return RowFailure(
        FailureCode.ENGINE_ERROR,
        f"the model's logits for generated token {sequence.num_generated + 1} are not finite; "
        f"dtype: float32 may help",
    )


_MORE_MEMORY = (
    "Give the KV cache more memory (kv_cache_memory_bytes, gpu_memory_utilization or "
    "num_gpu_blocks_override), or lower max_tokens"
)
