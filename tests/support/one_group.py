"""pytest plugin with a process group of one process, for ``pytest_plugins = ["one_group"]`` in a test module."""

from collections.abc import Iterator

import pytest

from process_groups import process_group


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with process_group(0, 1, str(tmp_path_factory.mktemp("group"))):
        yield
