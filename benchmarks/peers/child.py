"""One engine in a process of its own: load, then run cases when asked, each cold; a JSON line for each.

    PYTHON -m benchmarks.peers.child ORDER.json FD

A line of the input names a case; the answers go to the open file descriptor FD, for engines print. Started by
`benchmarks.peers.compare` in the environment of the engine that the order names. An engine is a module of
`benchmarks/peers/engines/` with a class `Engine`: `Engine(order)` loads; `generate(requests)` returns each
one's new ids; `forget()` empties the prefix cache; `settings()` says how it was set; PACKAGES names what its
speed depends on.
"""

import gc
import importlib
import json
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.engine.workloads import Request
from benchmarks.peers import measure
from benchmarks.peers.cases import Case, warm_up
from benchmarks.peers.refused import Refused


def read_case(plain: dict[str, Any]) -> Case:
    return Case(plain["name"], [Request(**request) for request in plain["requests"]], plain["one_by_one"])


def run(engine: Any, case: Case, idle_limit_s: float) -> dict[str, Any]:
    """Time one case on an engine that has computed none of its prompts."""
    engine.forget()
    engine.generate(warm_up(case))
    gc.collect()
    measure.wait_until_idle(idle_limit_s)
    measure.forget_peaks()
    watch, start = measure.Watch(), time.perf_counter()
    if case.one_by_one:
        outputs = [ids for request in case.requests for ids in engine.generate([request])]
    else:
        outputs = engine.generate(case.requests)
    seconds, others = time.perf_counter() - start, watch.others()
    for request, ids in zip(case.requests, outputs, strict=True):
        if len(ids) != request.max_tokens:
            raise AssertionError(f"{case.name}: {request.id} has {len(ids)} tokens, not {request.max_tokens}")
    return {
        "case": case.name,
        "seconds": round(seconds, 3),
        "noisy": None if others is None else others > measure.QUIET,
        "others_cpu": None if others is None else round(others, 3),
        "peak_mib": measure.peak_mib(),
        "outputs": outputs,
    }


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    order = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    cases = {plain["name"]: read_case(plain) for plain in order["cases"]}
    with open(int(sys.argv[2]), "w", encoding="utf-8") as answers:

        def tell(**facts: Any) -> None:
            answers.write(json.dumps(facts) + "\n")
            answers.flush()

        module = importlib.import_module("benchmarks.peers.engines." + order["engine"])
        start = time.perf_counter()
        try:
            engine = module.Engine(order)
        except Refused as refusal:
            tell(refused=str(refusal))
            return
        load_s = round(time.perf_counter() - start, 2)
        tell(
            load_s=load_s,
            load_mib=measure.peak_mib(),
            versions=versions(module.PACKAGES),
            settings=engine.settings(),
        )
        for line in sys.stdin:
            name = line.strip()
            try:
                tell(**run(engine, cases[name], order["idle_limit_s"]))
            except Refused as refusal:
                tell(case=name, refused=str(refusal))
        engine.close()


if __name__ == "__main__":
    main()
