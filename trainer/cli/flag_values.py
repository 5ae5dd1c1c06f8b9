"""What users write behind a flag: values with commas between, names, and numbers with K."""

from collections.abc import Collection
from difflib import get_close_matches


def listed(text: str) -> list[str]:
    """``a, b`` as ["a", "b"]."""
    return [each.strip() for each in text.split(",")]


def chosen(flag: str, text: str, known: Collection[str]) -> list[str]:
    """The names in a list, each once. Raises ValueError for one that is not known, naming the nearest that is."""
    names = list(dict.fromkeys(listed(text)))
    for name in names:
        if name not in known:
            nearest = get_close_matches(name, known, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known)}"
            raise ValueError(f"--{flag} {name!r} is not known; {hint}")
    return names


def size(text: str) -> int:
    """A batch size: 8K as 8192. Raises ValueError elsewhere."""
    return number(text, 1024, "a batch size is a number, with K for 1024, such as 512 or 8K")


def table_rows(text: str) -> int | None:
    """Rows of a table at most: 100K as 100,000, full as None. Raises ValueError elsewhere."""
    return None if text == "full" else number(text, 1000, "--rows is full or a number, with K for 1000, such as 100K")


def number(text: str, kilo: int, what: str) -> int:
    """A whole number, K standing for so many; raises ValueError saying what it is elsewhere."""
    digits, factor = (text[:-1], kilo) if text[-1:] in ("K", "k") else (text, 1)
    if not digits.isdecimal():
        raise ValueError(f"{what}; got {text!r}")
    return int(digits) * factor
