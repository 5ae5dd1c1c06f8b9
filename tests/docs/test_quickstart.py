"""The commands of docs/quickstart.md run in their order and print what the page shows."""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("lightgbm", reason="the extra is not installed: pip install 'cowrec[baseline]'")
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "quickstart.md").read_text(encoding="utf-8")


def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    (log,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    blocks = [block.strip() for block in re.findall(r"\n\n((?: {4}.+\n)+)", PAGE)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # The commands are those of this Python's environment.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run([sys.executable, "-c", log], cwd=tmp_path, check=True)
    printed, server = "", None
    try:
        for block in blocks:
            if block.startswith("curl") and server is not None:
                _wait_for(f"http://127.0.0.1:{port}/readyz", server)
            if not block.startswith(("cowrec", "curl")):
                for line in block.splitlines():
                    _require_alike(line, printed)
                continue
            commands, _, serve = block.replace("8000", port).partition("\n    cowrec serve ")
            ran = subprocess.run(
                ["bash", "-ec", commands], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
            )
            assert ran.returncode == 0, f"{commands}: {ran.stderr}"
            printed = ran.stdout + ran.stderr
            if serve:
                command = ["cowrec", "serve", *serve.removesuffix(" &").split()]
                server = subprocess.Popen(command, cwd=tmp_path, env=environment)
    finally:
        if server is not None:
            server.terminate()
            server.wait()
    shown = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0]
    assert shown in (tmp_path / "columns.toml").read_text()
    assert (tmp_path / "predictions.parquet").stat().st_size
    assert (tmp_path / "measures.json").stat().st_size


def _require_alike(line: str, printed: str) -> None:
    """Raises unless a line was printed that is this one but for what follows its `...`, and for the last digits."""
    words = re.sub(r"[\d.,]+", "#", line.strip().partition(" ...")[0])
    assert words in re.sub(r"[\d.,]+", "#", printed), f"{line!r} is not in {printed!r}"


def _wait_for(url: str, server: subprocess.Popen) -> None:
    while server.poll() is None:
        try:
            urllib.request.urlopen(url).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
