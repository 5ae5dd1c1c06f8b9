"""The documentation builds as a site without warnings, has the Python interface, and fetches nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cowrec.trainer

ROOT = Path(__file__).resolve().parents[2]
# What a browser loads by itself: not the links of a text.
LOADED = re.compile(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"(https?:|//)[^\"]*\"")


def test_the_site_builds_without_warnings_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the extra is not installed: pip install 'cowrec[docs]'")
    pytest.importorskip("mkdocstrings", reason="the extra is not installed: pip install 'cowrec[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    pages = {file.relative_to(tmp_path / "site").as_posix(): file.read_text() for file in tmp_path.rglob("*.html")}
    assert {"index.html", "reference.html", "tutorials/own_data.html"} <= pages.keys()
    assert not [f"{name}: {found[0]}" for name, text in pages.items() for found in LOADED.finditer(text)]
    for name in cowrec.trainer.__all__:
        assert name.startswith("_") or f'id="cowrec.trainer.{name}"' in pages["api/trainer.html"], name
    for name, text in pages.items():
        for image in re.findall(r"<img[^>]*src=\"([^\"]+)\"", text):
            assert (tmp_path / "site" / name).parent.joinpath(image).is_file(), f"{name}: {image}"
