"""Values of flags: lists with commas, known names, and numbers with K."""

from collections.abc import Collection

from cowrec.trainer.config.nearest_name import hint


def listed(text: str) -> list[str]:
    """The parts of ``a, b`` as ["a", "b"]."""
    return [each.strip() for each in text.split(",")]


def chosen(flag: str, text: str, known: Collection[str]) -> list[str]:
    """The names in a list, each once. Raises ValueError for an unknown name."""
    names = list(dict.fromkeys(listed(text)))
    for name in names:
        if name not in known:
            raise ValueError(f"--{flag} {name!r} is not known; {hint(name, known)}")
    return names


def size(text: str) -> int:
    """A batch size: 8K as 8192. Raises ValueError for any other text."""
    return number(text, 1024, "a batch size is a number, with K for 1024, such as 512 or 8K")


def table_rows(text: str) -> int | None:
    """The most rows of a table: 100K as 100,000, full as None. Raises ValueError for any other text."""
    return None if text == "full" else number(text, 1000, "--rows is full or a number, with K for 1000, such as 100K")


def number(text: str, kilo: int, what: str) -> int:
    """A whole number in which a final K stands for ``kilo``. Raises ValueError, which explains ``what`` is expected."""
    digits, factor = (text[:-1], kilo) if text[-1:] in ("K", "k") else (text, 1)
    if not digits.isdecimal():
        raise ValueError(f"{what}; got {text!r}")
    return int(digits) * factor
