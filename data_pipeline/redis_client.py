"""The client of a Redis server, for streams and for publications."""

from typing import Any
from urllib.parse import SplitResult, urlsplit, urlunsplit

from cowrec.errors import UserError
from cowrec.urls import split_url, without_credentials

REDIS_SCHEMES = "redis", "rediss", "redis+sentinel", "rediss+sentinel"
_SENTINEL_PORT = 26379


def refusal(error: BaseException | None) -> str:
    """Returns the remedy for an error of redis-py that each further attempt meets; empty for one that may pass.

    Connections, time-outs, a server that loads, is busy, is full, or has become a replica may pass.
    """
    from redis import exceptions as redis

    if isinstance(error, redis.AuthenticationError | redis.AuthorizationError | redis.NoPermissionError):
        return "correct the user and the password of the address, or the permissions of the user"
    if isinstance(error, redis.AskError | redis.ClusterCrossSlotError):  # that a key has moved is an AskError
        return (
            "Redis Cluster is not supported, as it keeps the keys of a publication apart; give one server or Sentinels"
        )
    return ""


def open_redis(url: str, **options: Any) -> Any:
    """Creates the client of a Redis server, `redis.Redis` with redis-py's options; it connects when it is used.

    It makes one attempt: callers decide about further ones.

    Args:
        url: ``redis://USER:PASSWORD@HOST:PORT/DB``, or ``redis+sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/MASTER/DB``
            for the master that Sentinels name; ``rediss`` for TLS. `sentinel_username` and `sentinel_password` after a
            ``?`` are for the Sentinels.

    Raises ValueError: the URL is not valid, or redis-py is not installed.
    """
    try:
        import redis
    except ImportError:
        raise UserError("Redis requires redis-py, which is not installed: pip install 'cowrec[online]'") from None
    parts = split_url(url)
    options = {"retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0), **options}
    try:
        is_of_sentinels = parts.scheme.endswith("+sentinel")
        client = _of_sentinels(redis, parts, options) if is_of_sentinels else redis.Redis.from_url(url, **options)
        client.connection_pool.make_connection()  # checks the options, and does not connect
    except (ValueError, TypeError) as error:
        raise UserError(f"{without_credentials(url)} is not a URL for redis-py: {error}") from None
    return client


def _of_sentinels(redis: Any, parts: SplitResult, options: dict[str, Any]) -> Any:
    """Creates the client of the master that Sentinels name, now and after each failover; `redis` is the module."""
    user, at, places = parts.netloc.rpartition("@")
    master, _, database = parts.path.strip("/").partition("/")
    sentinels = [urlsplit(f"//{place}") for place in places.split(",")]
    if not master or not all(each.hostname for each in sentinels):
        raise ValueError("write it as redis+sentinel://HOST:PORT,HOST:PORT/MASTER/DB")
    scheme = parts.scheme.removesuffix("+sentinel")
    plain = parts._replace(scheme=scheme, netloc=f"{user}{at}localhost", path=f"/{database}")
    given = {
        key: value
        for key, value in redis.connection.parse_url(urlunsplit(plain)).items()
        if key not in ("host", "connection_class")
    }
    own = {key: given.pop(f"sentinel_{key}") for key in ("username", "password") if f"sentinel_{key}" in given}
    tls = {"ssl": True} if scheme == "rediss" else {}
    certificates = {key: value for key, value in given.items() if key.startswith("ssl_")}
    addresses = [(each.hostname, each.port or _SENTINEL_PORT) for each in sentinels]
    asked = redis.Sentinel(addresses, sentinel_kwargs={**options, **tls, **certificates, **own})
    return asked.master_for(master, **{**options, **given, **tls})
