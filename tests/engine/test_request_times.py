"""Times in a RequestOutput's `metrics`: of requests that wait, are preempted, refused or cut short."""

import time
from typing import Any

import pytest

from batchgen.outputs import RequestOutput, RequestStateStats
from batchgen.sampling_params import RequestOutputKind

FINAL_ONLY = RequestOutputKind.FINAL_ONLY


def drive(made: Any) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while made.client.in_flight():
        for output in made.client.poll():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def times(stats: RequestStateStats) -> list[float]:
    found = [stats.queued_ts, stats.scheduled_ts, stats.first_token_ts, stats.last_token_ts]
    assert None not in found
    return found


def test_a_request_that_waits_is_scheduled_when_the_one_before_it_has_ended(
    make_client: Any, make_request: Any
) -> None:
    made = make_client(max_num_seqs=1, max_num_batched_tokens=8)
    before, wall = time.monotonic(), time.time()
    for name in "ab":
        # The prompt takes three steps.
        made.client.add(make_request(name, [1] * 20, max_tokens=5, output_kind=FINAL_ONLY))
    ends = {name: outputs[-1].metrics for name, outputs in drive(made).items()}
    first, second = ends["a"], ends["b"]
    for stats in (first, second):
        assert stats.num_generation_tokens == 5
        assert wall <= stats.arrival_time <= time.time()
        order = [before, *times(stats), time.monotonic()]
        assert order == sorted(order)
        assert stats.first_token_latency == pytest.approx(stats.first_token_ts - stats.queued_ts, abs=0.05)
    assert second.queued_ts < first.scheduled_ts < first.last_token_ts < second.scheduled_ts


def test_being_preempted_changes_neither_the_start_nor_the_first_token(
    make_client: Any, make_request: Any
) -> None:
    made = make_client(num_gpu_blocks_override=5, enable_prefix_caching=False)
    for name in "abc":
        made.client.add(make_request(name, [7] * 10, max_tokens=40, ignore_eos=True, streams=True))
    outputs = drive(made)
    assert made.client.stats().num_preemptions > 0
    for told in outputs.values():
        stats = [output.metrics for output in told]
        assert {each.first_token_ts for each in stats} == {stats[-1].first_token_ts}
        assert {each.scheduled_ts for each in stats} == {stats[-1].scheduled_ts}
        # Before the end nobody says that a token was the last.
        assert [each.last_token_ts for each in stats[:-1]] == [None] * (len(stats) - 1)
        assert times(stats[-1]) == sorted(times(stats[-1]))
        assert [each.num_generation_tokens for each in stats] == list(range(1, 41))


@pytest.mark.parametrize("more", [{"n": 3, "temperature": 1.0}, {"n": 2, "use_beam_search": True}])
def test_several_samples_share_their_times(make_client: Any, make_request: Any, more: dict[str, Any]) -> None:
    made = make_client()
    made.client.add(make_request("a", [7], max_tokens=4, ignore_eos=True, output_kind=FINAL_ONLY, **more))
    (output,) = drive(made)["a"]
    assert output.metrics.num_generation_tokens == 4 * more["n"]
    assert times(output.metrics) == sorted(times(output.metrics))


def test_what_a_stop_string_ends_has_an_end(
    make_client: Any, make_request: Any, expected_tokens: Any
) -> None:
    made = make_client()
    letters = bytes(expected_tokens(make_request("x", [7], max_tokens=6))).decode()
    made.client.add(make_request("a", [7], max_tokens=99, stop=[letters[3]], output_kind=FINAL_ONLY))
    (output,) = drive(made)["a"]
    assert output.outputs[0].stop_reason == letters[3]
    assert times(output.metrics) == sorted(times(output.metrics))


def test_a_refused_request_was_never_scheduled(make_client: Any, make_request: Any) -> None:
    made = make_client()
    made.client.add(make_request("a", []))
    (output,) = drive(made)["a"]
    assert output.error is not None
    stats = output.metrics
    assert stats.queued_ts is not None
    assert (stats.scheduled_ts, stats.first_token_ts, stats.last_token_ts) == (None, None, None)
    assert (stats.num_generation_tokens, stats.first_token_latency) == (0, None)


def test_times_play_no_part_in_comparisons(make_client: Any, make_request: Any) -> None:
    found = []
    for _ in range(2):
        made = make_client()
        made.client.add(make_request("a", [7], max_tokens=4, output_kind=FINAL_ONLY))
        found += drive(made)["a"]
    assert found[0] == found[1] and found[0].metrics != found[1].metrics
