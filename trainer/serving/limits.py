"""Limits of a prediction service; what exceeds them is refused."""

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of a service; requests beyond them are rejected.

    Attributes:
        request_bytes: size of a request's body.
        samples: in one request.
        concurrent_requests: prediction requests that have arrived and wait for their result.
        connections: open connections.
        client_connections: of them, those from one address; a proxy in front is one address.
        request_seconds: time for a request to arrive, from a connection's start or the request's first byte on.
        timeout_ms: milliseconds from the arrival of a request to its prediction; a request that would wait longer is
            refused at once, and not computed if it did.
    """

    request_bytes: int = 1 << 20
    samples: int = 1000
    concurrent_requests: int = 256
    connections: int = 512
    client_connections: int = 256
    request_seconds: float = 10.0
    timeout_ms: float = 1000.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise ValueError(f"{field.name} must be at least 1, got {value}")
