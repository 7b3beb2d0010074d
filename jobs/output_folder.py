"""Whether an output folder can be written, asked without touching the disk."""

import os
from pathlib import Path


def check_writable(folder: Path) -> str | None:
    """Why that folder cannot be made or written, or None when it can."""
    if folder.exists() and not folder.is_dir():
        return f"{folder} is a file, not a folder"
    closest = folder
    while not closest.exists() and closest != closest.parent:
        closest = closest.parent
    if not closest.is_dir():
        return f"{folder} cannot be made: {closest} is a file"
    if not os.access(closest, os.W_OK | os.X_OK):
        return f"{folder} cannot be written: no permission in {closest}, or a read-only disk"
    return None
