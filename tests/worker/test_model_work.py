"""What a batch asks of the machine, counted by hand."""

import pytest
import torch

from batchgen.engine.scheduler_output import DrawRules, SamplingRow, ScheduledSequence, SchedulerOutput
from batchgen.sampling_params import SamplingParams
from batchgen.worker.input_batch import BatchBuilder
from batchgen.worker.model_work import ModelWork, StepWork


@pytest.mark.parametrize(("window", "num_keys"), [(None, 3 + 4 + 5 + 18), (4, 3 + 4 + 4 + 4)])
def test_keys_that_queries_see_and_blocks_that_are_read(window: int | None, num_keys: int) -> None:
    row = SamplingRow(2, DrawRules(SamplingParams(temperature=0)), (0, 0, 18), 0)
    step = SchedulerOutput(
        0,
        (
            # Two blocks are shared; one is there for later and not read yet.
            ScheduledSequence(1, [5, 6, 7], 2, ([8, 3, 5, 7, 2, 9],)),
            ScheduledSequence(2, [9], 17, ([8, 3, 6, 4, 0],), (row,)),
        ),
    )
    batch = BatchBuilder(block_size=4, num_groups=1, device=torch.device("cpu")).build(step, {})
    found = ModelWork(windows=(window,)).step(batch)
    assert found == StepWork(num_tokens=4, num_rows=1, num_keys=[num_keys], num_blocks=[8])
