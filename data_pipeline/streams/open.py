"""Addresses of streams: opens the source that an address names."""

from typing import Literal
from urllib.parse import parse_qsl, urlencode, urlunsplit

from cowrec.errors import UserError
from cowrec.urls import split_url, without_credentials

from ..redis_client import REDIS_SCHEMES
from ..remote import local_path
from .brokers import KafkaSource, RedisSource
from .directory import DirectorySource
from .source import SampleSource


def open_source(
    address: str,
    *,
    damaged: Literal["stop", "skip"] = "stop",
    order: Literal["time", "name"] = "time",
    grace: float = 30.0,
) -> SampleSource:
    """Opens the source at an address.

    Args:
        address: a folder or file:///folder; redis://host:port/db?stream=NAME, also by Sentinels (see `open_redis`);
            kafka://broker[,broker]/topic, with further librdkafka settings after a "?".
        damaged, order, grace: of a folder, see `DirectorySource`.

    Raises ValueError: the address is of another kind or incomplete, or a package is not installed; OSError: the source
    does not exist or does not answer.
    """
    parts, shown = split_url(address), without_credentials(address)
    options = dict(parse_qsl(parts.query.replace("+", "%2B")))  # which is a space in forms of web pages only
    if parts.scheme in REDIS_SCHEMES:
        stream = options.pop("stream", "")
        if not stream:
            raise UserError(f"{shown}: must name a stream; add ?stream=NAME")
        return RedisSource(urlunsplit(parts._replace(query=urlencode(options))), stream)
    if parts.scheme == "kafka":
        topic = parts.path.strip("/")
        if "@" in parts.netloc:
            raise UserError(
                f"{shown}: give Kafka's user and password after a ?, as sasl.username=...&sasl.password=..."
            )
        if not parts.netloc or not topic or "/" in topic:
            raise UserError(f"{shown}: must be kafka://broker[,broker]/topic")
        return KafkaSource(parts.netloc, topic, options)
    if parts.scheme not in ("", "file"):
        raise UserError(f"{shown}: must be a folder, redis:// or kafka://, got {parts.scheme}://")
    return DirectorySource(local_path(address), damaged, order, grace)
