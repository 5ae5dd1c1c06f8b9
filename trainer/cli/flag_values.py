"""Values of flags: lists with commas, known names, and numbers with K."""

from collections.abc import Collection

from cowrec.trainer.config.nearest_name import hint


def parse_list(text: str) -> list[str]:
    """Splits ``a, b`` into ["a", "b"]."""
    return [each.strip() for each in text.split(",")]


def parse_names(flag: str, text: str, known: Collection[str]) -> list[str]:
    """Splits a list into known names, each once. Raises ValueError for an unknown name."""
    names = list(dict.fromkeys(parse_list(text)))
    for name in names:
        if name not in known:
            raise ValueError(f"--{flag} {name!r} is not known; {hint(name, known)}")
    return names


def parse_batch_size(text: str) -> int:
    """Reads a batch size; 8K is 8192. Raises ValueError for any other text."""
    return parse_number(text, 1024, "a batch size must be a number, with K for 1024, such as 512 or 8K")


def parse_table_rows(text: str) -> int | None:
    """Reads the most rows of a table; 100K is 100,000, full is None. Raises ValueError for any other text."""
    if text == "full":
        return None
    return parse_number(text, 1000, "--rows must be full or a number, with K for 1000, such as 100K")


def parse_range(flag: str, text: str) -> tuple[float, float] | None:
    """Reads LOWEST,HIGHEST; fixed is None. Raises ValueError, which names the flag."""
    if text == "fixed":
        return None
    try:
        low, high = map(float, parse_list(text))
    except ValueError:
        raise ValueError(f"{flag} must be fixed or LOWEST,HIGHEST, such as 1e-5,1e-3; got {text!r}") from None
    return low, high


def parse_number(text: str, kilo: int, what: str) -> int:
    """Reads a whole number; a final K means ``kilo``. Raises ValueError, which starts with ``what``."""
    digits, factor = (text[:-1], kilo) if text[-1:] in ("K", "k") else (text, 1)
    if not digits.isdecimal():
        raise ValueError(f"{what}; got {text!r}")
    return int(digits) * factor
