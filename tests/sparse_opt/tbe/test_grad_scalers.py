"""GradScalers that are found in the process, by a private attribute of torch 2.11 and 2.13."""

import gc

import torch
from torch.amp import GradScaler

from cowrec.sparse_opt.tbe.discovery import grad_scalers_in_use


class OwnScaler(GradScaler):
    pass


def test_scalers_that_have_scaled_a_loss_are_found() -> None:
    gc.collect()  # scalers of other tests
    unused, disabled = GradScaler("cpu"), GradScaler("cpu", enabled=False)
    disabled.scale(torch.ones(()))
    assert grad_scalers_in_use() == []
    own = OwnScaler("cpu")
    for each in (unused, own):
        each.scale(torch.ones(()))
    assert {*grad_scalers_in_use()} == {unused, own}
