"""How numbers of things and times are said, everywhere the same."""


def counted(number: int, noun: str) -> str:
    """A number of things: 1 row, 2,000 rows."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float | None) -> str:
    """A time as a reader says it: 42s, 3m10s, 2h05m, 3d04h; "" for None."""
    if seconds is None:
        return ""
    whole = max(0, round(seconds))
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // part:02d}{smaller}"
    return f"{whole}s"
