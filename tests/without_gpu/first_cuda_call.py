"""pytest plugin: tests marked gpu run up to their first tensor on CUDA; prints how each of them ended.

There torch, which is built for CPU or finds no driver, raises an error that names CUDA or the driver.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

_init_process_group = dist.init_process_group


def _with_gloo(*_: Any, **settings: Any) -> None:
    _init_process_group(**settings | {"backend": "gloo", "device_id": None})


torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)
torch.cuda.set_device = lambda _: None
dist.init_process_group = _with_gloo


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    report = yield
    if call.excinfo is not None:
        error = call.excinfo.value
        at_cuda = any(word in str(error) for word in ("CUDA", "cuda", "NVIDIA driver"))
        print(f"\nended: {item.nodeid}: {'at CUDA' if at_cuda else repr(error)}")
    return report
