"""benchmarks.peers: what is computed from the runs, and the cases it makes."""

import subprocess
import sys

import pytest

# The installed batchgen comes first on the path, the benchmarks lie in the repository alone.
BEGIN = """
import sys
sys.path.append(sys.argv[1])
from benchmarks.peers.summary import Cell, best_peer, groups, memory_table, ratio, table

def cell(engine, *seconds, case="w1", noisy=False):
    made = Cell("fp32", case, engine)
    for value in seconds:
        made.add({"seconds": value, "noisy": noisy, "peak_mib": 100}, 1000)
    return made
"""
RATIO = """
cells = [cell("batchgen", 4, 2, 5), cell("vllm", 8, 9, 1), cell("openvino", 5)]
assert [one.rate for one in cells] == [250, 125, 200]
assert best_peer(cells).engine == "openvino"
assert ratio(cells) == 1.25
assert ratio(cells[:1]) is None and ratio(cells[1:]) is None
refused = Cell("fp32", "w1", "openvino")
refused.add({"refused": "no such cache"}, 1000)
assert refused.rate is None and refused.refused == "no such cache"
assert ratio([cells[0], cells[1], refused]) == 2
"""
TABLE = """
cells = [cell("batchgen", 4), cell("vllm", 8, noisy=True), cell("batchgen", 2, case="long")]
assert list(groups(cells)) == [("fp32", "w1"), ("fp32", "long")]
assert table(cells).splitlines() == [
    "| output tokens/s | case | batchgen |   vllm | to the best peer |",
    "|-----------------|------|---------:|-------:|-----------------:|",
    "| fp32            | w1   |    250.0 | 125.0* |            2.00× |",
    "| fp32            | long |    500.0 |      – |                – |",
]
assert memory_table(cells).splitlines()[2:] == [
    "| fp32   | batchgen |      100 |      – |",
    "| fp32   | vllm     |      100 |      – |",
]
"""
PICTURE = """
from xml.etree import ElementTree
from benchmarks.peers.picture import draw
root = ElementTree.fromstring(draw([cell("batchgen", 4), cell("vllm", 8)], "a <machine>"))
bars = [part for part in root if part.tag.endswith("rect") and part.get("height") == "16"]
widths = [float(bar.get("width")) for bar in bars]
assert len(widths) == 2 and widths[0] == 2 * widths[1], widths
"""
NEWEST = """
from benchmarks.peers.summary import newest
def line(engine, rate, case="w1", column="fp32"):
    return {"case": {"column": column, "case": case, "engine": engine}, "rounds": [rate, rate], "noisy": 0}
old = [line("batchgen", 9), line("vllm", 9), line("openvino", 9), line("batchgen", 3, case="single")]
new = [line("batchgen", 4, column="int8"), line("batchgen", 2), line("vllm", 1)]
new.append(line("batchgen", 5, case="w2"))
cells = [(one.column, one.case, one.engine, one.rate) for one in newest(old + new)]
assert cells == [
    ("fp32", "w1", "batchgen", 2), ("fp32", "w1", "vllm", 1), ("fp32", "w2", "batchgen", 5),
    ("fp32", "single", "batchgen", 3), ("int8", "w1", "batchgen", 4),
], cells
"""
CASES = """
from benchmarks.engine.workloads import Request
from benchmarks.peers.cases import common_tokens, long_requests, make_cases, warm_up
prompts = [[n, n + 1, n + 2] for n in range(200, 240)] + [[5] * 90 + [n] for n in range(9)]
long = long_requests(prompts, count=3, length=500, output=2)
assert [len(request.prompt_token_ids) for request in long] == [500] * 3
assert common_tokens(long) == 0 and len({tuple(request.prompt_token_ids[1:]) for request in long}) == 3
assert long[0].prompt_token_ids.count(5) < 500
same = [Request("a", [1, 2, 3, 4], 1), Request("b", [1, 2, 5], 1), Request("c", [1, 2, 3], 1)]
assert common_tokens(same) == 2 and common_tokens(same[:1]) == 3
cases = make_cases("all", 2, vocab_size=1000)
assert [case.name for case in cases][-2:] == ["single", "long"]
assert all(len(case.requests) == 2 for case in cases) and cases[-2].one_by_one
assert {len(case.requests[0].prompt_token_ids) for case in cases[-1:]} == {6000}
for case in cases:
    firsts = {request.prompt_token_ids[0] for request in warm_up(case)}
    assert firsts.isdisjoint({request.prompt_token_ids[0] for request in case.requests})
"""


@pytest.mark.parametrize(
    "code",
    [RATIO, TABLE, PICTURE, NEWEST, CASES],
    ids=["ratio", "table", "picture", "newest", "cases"],
)
def test_peer_benchmarks(code, repository, monkeypatch):
    monkeypatch.delenv("BATCHGEN_BENCH_DATA", raising=False)
    result = subprocess.run(
        [sys.executable, "-c", BEGIN + code, str(repository)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
