"""The event log: whole lines, rotation, readers that know less than the writer."""

import json
import math
from pathlib import Path

from batchgen.jobs.events import EventLog, event_files, read_events, unpack_bytes


def test_events_are_read_back_in_order_and_a_new_run_begins_a_new_file(tmp_path: Path) -> None:
    for run in range(2):
        log = EventLog(tmp_path)
        log.put("run", number=run)
        log.put("block_map", blocks=bytes([0, 1, 2, 3] * 1000))
        log.close()
    events = list(read_events(tmp_path))
    assert [event["kind"] for event in events] == ["run", "block_map"] * 2
    assert [event["number"] for event in events[::2]] == [0, 1]
    assert unpack_bytes(events[1]["blocks"]) == bytes([0, 1, 2, 3] * 1000)
    assert all(event["v"] == 1 and math.isfinite(event["t"]) for event in events)
    assert len(event_files(tmp_path)) == 2


def test_files_are_rotated_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    log = EventLog(tmp_path, max_file_bytes=1000)
    for number in range(200):
        log.put("interval", number=number, text="x" * 100)
    log.close()
    files = event_files(tmp_path)
    assert len(files) == 8 and files[0].name != "000001.jsonl"
    assert all(path.stat().st_size < 1300 for path in files)
    numbers = [event["number"] for event in read_events(tmp_path)]
    assert numbers == list(range(numbers[0], 200))


def test_reader_passes_over_what_it_does_not_know(tmp_path: Path) -> None:
    lines = [
        json.dumps({"v": 1, "t": 1.0, "kind": "interval", "new_key": {"deep": 1}}),
        json.dumps({"v": 1, "t": 1.0, "kind": "of a later version"}),
        json.dumps({"v": 2, "t": 1.0, "kind": "interval"}),
        json.dumps([1, 2]),
        '{"v": 1, "t": 1.0, "kind": "cut of',
    ]
    (tmp_path / "000001.jsonl").write_text("\n".join(lines))
    (tmp_path / "notes.jsonl").write_text("not ours")
    assert [event["kind"] for event in read_events(tmp_path)] == ["interval", "of a later version"]


def test_a_folder_that_goes_away_costs_events_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    log = EventLog(folder)
    log.put("run")
    log.close()
    assert log.num_dropped == 1
