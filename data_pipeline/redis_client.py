"""The client of a Redis server, for streams and for publications."""

from typing import Any

from cowrec.errors import UserError
from cowrec.urls import split_url, without_credentials


def is_refusal(error: BaseException | None) -> bool:
    """True for redis-py's error of a server that refuses the user or the password, which is a ConnectionError too."""
    from redis.exceptions import AuthenticationError, AuthorizationError

    return isinstance(error, AuthenticationError | AuthorizationError)


def open_redis(url: str, **options: Any) -> Any:
    """Creates the client of a Redis server, `redis.Redis` with redis-py's options; it connects when it is used.

    The URL is ``redis://USER:PASSWORD@HOST:PORT/DB``, or ``rediss://`` for TLS. Raises ValueError if it is not valid,
    or redis-py is not installed.
    """
    try:
        import redis
    except ImportError:
        raise UserError("Redis requires redis-py, which is not installed: pip install 'cowrec[online]'") from None
    split_url(url)
    try:
        client = redis.Redis.from_url(url, **options)
        client.connection_pool.make_connection()  # checks the options, and does not connect
    except (ValueError, TypeError) as error:
        raise UserError(f"{without_credentials(url)} is not a URL for redis-py: {error}") from None
    return client
