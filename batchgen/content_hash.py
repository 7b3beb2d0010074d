"""content_hash: what a file holds, as a short string; whole for small files, by samples for big ones."""

import hashlib
from pathlib import Path

WHOLE_UP_TO = 256 * 2**20
SAMPLE_BYTES = 2**20
NUM_SAMPLES = 64


def content_hash(path: str | Path) -> str:
    """Hash of a file's size and bytes: never its name or time.

    "sha256:HEX" of all bytes up to 256 MiB; "sampled-sha256:SIZE:HEX" above: head, tail and 64 evenly spaced
    pieces of 1 MiB.
    """
    path = Path(path)
    size = path.stat().st_size
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        if size <= WHOLE_UP_TO:
            while piece := file.read(SAMPLE_BYTES):
                digest.update(piece)
            return f"sha256:{digest.hexdigest()}"
        last = size - SAMPLE_BYTES
        for number in range(NUM_SAMPLES + 2):
            file.seek(last * number // (NUM_SAMPLES + 1))
            digest.update(file.read(SAMPLE_BYTES))
    return f"sampled-sha256:{size}:{digest.hexdigest()}"
