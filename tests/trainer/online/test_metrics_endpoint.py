"""The port on which Prometheus reads the metrics of an online run."""

from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from cowrec.trainer.online.measurements import metrics_endpoint


def test_metrics_have_one_path() -> None:
    with metrics_endpoint("127.0.0.1", 0, lambda: ({"steps": 7.0}, {"late": 3})) as port:
        for query in ("", "?at=now"):
            with urlopen(f"http://127.0.0.1:{port}/metrics{query}") as answer:
                assert "cowrec_online_steps_total 7.0" in answer.read().decode()
        for path in ("/", "/metric", "/metrics/", "/health", "/favicon.ico"):
            with pytest.raises(HTTPError) as refused:
                urlopen(f"http://127.0.0.1:{port}{path}")
            assert refused.value.code == 404
            assert refused.value.read() == b"the metrics are at /metrics\n"
        with pytest.raises(HTTPError) as refused:
            urlopen(Request(f"http://127.0.0.1:{port}/metrics", b"x", method="POST"))
        assert refused.value.code == 405
