"""Embeddings of several widths, and rates of single tables: a short run against plain PyTorch in float64."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, relu

from cowrec.data_pipeline import Batch, Reader
from cowrec.models import physical_dim
from cowrec.trainer.config.run import load_config
from cowrec.trainer.export.export import dense_weights
from cowrec.trainer.runtime.processes import process_group
from cowrec.trainer.sharded_model.build import gathered_table, tables_of
from cowrec.trainer.sharded_model.run_plan import LrSchedule, RunPlan
from cowrec.trainer.training.state import TrainState
from trainer_cases import config_file, make_data

DIM, WIDTHS = 6, {"city": 3, "tags": 6, "history": 9}
RATES = {"city": 0.5, "tags": 2.0, "history": 1.0}
LR, L2, R, ZETA, EPS = 1e-2, 1e-4, 0.5, 1e-4, 1e-6
SETTINGS = ["model.embedding_dims={city = 3, history = 9}", "optimizer.embedding_lr_factors={city = 0.5, tags = 2}"]
SETTINGS += ["optimizer.scaling=none", f"optimizer.eps={EPS}"]


class PlainDeepFm:
    """DeepFM and the published CowClip on complete tables, as formulas on copies of a state's weights."""

    def __init__(self, tables: dict[str, Tensor], dense: dict[str, Tensor]) -> None:
        self.tables = {name: table.double().requires_grad_() for name, table in tables.items()}
        self.dense = {name: parameter.double().requires_grad_() for name, parameter in dense.items()}
        groups = [{"params": [table], "lr": LR * RATES[name]} for name, table in self.tables.items()]
        self.adam = torch.optim.Adam([*groups, {"params": list(self.dense.values())}], lr=LR, eps=EPS)

    def logits(self, batch: Batch) -> Tensor:
        dense, embeddings, wide = batch.dense.double(), [], torch.zeros(1)
        for name, width in WIDTHS.items():
            bag = batch.sparse[name]
            sample = torch.repeat_interleave(torch.arange(len(dense)), bag.lengths().long())
            rows = self.tables[name][bag.values()] * bag.weights().double()[:, None]
            pooled = torch.zeros(len(dense), rows.shape[1], dtype=torch.float64).index_add(0, sample, rows)
            kernel = torch.eye(DIM).double()
            if width != DIM:
                (kernel,) = self.dense[f"front.layout.projections.kernels.{width}"]
            embeddings.append(pooled[:, :width] @ kernel)
            wide = wide + pooled[:, width]
        pairs = sum((embeddings[i] * embeddings[j]).sum(1) for i in range(3) for j in range(i))
        linear = wide + self.dense["linear.bias"] + dense @ self.dense["linear.kernel"][:, 0]
        hidden = torch.cat([*embeddings, dense], dim=1) @ self.dense["mlp.layers.0.weight"].T
        return linear + pairs + relu(hidden + self.dense["mlp.layers.0.bias"]) @ self.dense["output.kernel"][:, 0]

    def step(self, batch: Batch) -> None:
        self.adam.zero_grad()
        loss = binary_cross_entropy_with_logits(self.logits(batch), batch.label.double())
        (loss + L2 * self.dense["linear.kernel"].square().sum()).backward()
        for name, width in WIDTHS.items():
            table = self.tables[name]
            assert table.grad is not None
            table.grad += 2 * L2 * table.detach()
            counts = torch.bincount(batch.sparse[name].values(), minlength=len(table)).clamp(min=1)
            limit = counts * (R * table.detach()[:, :width].norm(dim=1)).clamp(min=ZETA)
            norm = table.grad[:, :width].norm(dim=1).clamp(min=1e-300)
            table.grad[:, :width] *= (limit / norm).clamp(max=1)[:, None]
        self.adam.step()


@pytest.mark.parametrize("absent_rows", ["replay", "dense"])
def test_a_run_equals_plain_pytorch(tmp_path: Path, absent_rows: str) -> None:
    """Five steps with bags of up to four weighted ids; a step moves a weight by up to 0.02, float32 rounds by 1e-7."""
    make_data(tmp_path)
    config = load_config(config_file(tmp_path), [*SETTINGS, f"optimizer.absent_rows={absent_rows}"])
    with process_group("cpu") as process:
        reader = Reader(tmp_path / "data", "train", batch_size=51)
        state = TrainState(RunPlan.of(config, reader.schema, process, schedule=LrSchedule()))

        def tables() -> dict[str, Tensor]:
            return {name: gathered_table(tensor, process).clone() for name, tensor in tables_of(state.model).items()}

        plain, rows = PlainDeepFm(tables(), dense_weights(state.model)), reader.schema.sparse
        sizes = {field.name: field.num_embeddings * physical_dim(WIDTHS[field.name]) for field in rows}
        assert {name: table.numel() for name, table in tables().items()} == sizes
        hidden = 8 * (3 * DIM + 1) + 8
        assert sum(parameter.numel() for parameter in plain.dense.values()) == (3 + 9) * DIM + hidden + 8 + 1 + 1
        for batch in reader.epoch(0):
            plain.step(batch)
        batches = map(state.ids.training, reader.epoch(0))
        for _ in range(5):
            state.step(batches)
        for name, expected in plain.tables.items():
            torch.testing.assert_close(tables()[name].double(), expected.detach(), rtol=0, atol=2e-5, msg=name)
        for name, got in dense_weights(state.model).items():
            torch.testing.assert_close(got.double(), plain.dense[name].detach(), rtol=0, atol=2e-5, msg=name)
