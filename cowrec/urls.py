"""URLs of servers and object stores: how they are split, and shown without their credentials."""

import re
from urllib.parse import SplitResult, urlsplit

from cowrec.errors import UserError

_HIDDEN = "***"
_SECRET_OPTION = re.compile(r"pass|secret|token|key|cred|pem|auth|user", re.IGNORECASE)
_HOST_AND_PORT = re.compile(r"[^/:]+:\d+/")


def without_credentials(url: str) -> str:
    """Returns a URL to show in messages and logs: `***` in place of user and password, and of options with secrets.

    A path is returned as it is. A user without a password is shown, except one of Redis. What is hidden reaches up to
    the last "@", so that a password with "/", "?" or "#" is hidden too.
    """
    scheme, found, rest = url.partition("://")
    if not found:
        return url
    user, at, place = rest.rpartition("@")
    if at and (scheme.startswith("redis") or (":" in user and not _HOST_AND_PORT.match(user))):
        rest = f"{_HIDDEN}@{place}"
    place, mark, query = rest.partition("?")
    options = (option.partition("=") for option in query.split("&"))
    shown = "&".join(
        f"{key}={_HIDDEN}" if _SECRET_OPTION.search(key) else key + sign + value for key, sign, value in options
    )
    return f"{scheme}://{place}{mark}{shown}"


def split_url(url: str) -> SplitResult:
    """Splits a URL or a path. Raises UserError, which does not show its credentials, if it is invalid."""
    try:
        parts = urlsplit(url)
        _ = parts.port if parts.scheme in ("redis", "rediss") else None
    except ValueError:
        raise UserError(
            f'{without_credentials(url)} is not a valid URL; write "@", "/", "?", "#" and "[" of a password as %40,'
            " %2F, %3F, %23 and %5B"
        ) from None
    return parts
