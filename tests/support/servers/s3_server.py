"""A real S3 server on loopback for tests: moto's, in a process of its own, which forgets everything at its end."""

import atexit
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pyarrow.fs as pafs
import pytest

from run_comparison import wait_for
from trainer_cases import free_port


def client_environment(endpoint: str) -> dict[str, str]:
    """What leads clients to a server."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class S3Server:
    """An S3 server with a bucket "bucket"; `environment` leads clients to it."""

    def __init__(self) -> None:
        port = free_port()
        self.endpoint = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.environment = client_environment(self.endpoint)
        wait_for(self._answers)
        self.files().create_dir("bucket")

    def files(self) -> pafs.S3FileSystem:
        return pafs.S3FileSystem(
            access_key="test",
            secret_key="test",
            region="us-east-1",
            endpoint_override=self.endpoint,
            allow_bucket_creation=True,
        )

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.endpoint}/moto-api/", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@cache
def _server() -> S3Server:
    """The server of this process; it takes a second to start."""
    server = S3Server()
    atexit.register(server.close)
    return server


@contextmanager
def s3_clients() -> Iterator[S3Server]:
    """Leads S3 clients in this process and its children to the server, whose bucket is kept from test to test."""
    server = _server()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server
