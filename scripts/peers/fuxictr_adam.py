"""FuxiCTR's training step with its Adam, on a DeepFM of its layers: L2 on all tables in the loss, dense gradients.

The package has the layers but not the model. Its gradient clip is one norm over all parameters. Dense features have
embeddings too, as its layers require.
"""

import tempfile

import numpy as np
import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch.layers import FactorizationMachine, FeatureEmbedding, MLP_Block
from fuxictr.pytorch.models import BaseModel
from torch import Tensor

from .timed_steps import EMBEDDING_DIM, HIDDEN, L2, Job, work

LABEL = "click"


class DeepFM(BaseModel):
    def __init__(self, features: FeatureMap, folder: str) -> None:
        super().__init__(features, embedding_regularizer=L2, verbose=0, model_root=folder, metrics=["AUC"])
        self.embeddings = FeatureEmbedding(features, EMBEDDING_DIM)
        self.fm = FactorizationMachine(features)
        self.mlp = MLP_Block(len(features.features) * EMBEDDING_DIM, list(HIDDEN), output_dim=1)
        self.compile("adam", "binary_crossentropy", lr=1e-3)
        self.reset_parameters()

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        fields = self.get_inputs(inputs)
        embedded = self.embeddings(fields)
        logits = self.fm(fields, embedded) + self.mlp(embedded.flatten(1))
        return {"y_pred": self.output_activation(logits)}


class FuxiCTR:
    def __init__(self, job: Job) -> None:
        folder = tempfile.gettempdir()
        features = FeatureMap("criteo", folder)
        features.labels = [LABEL]
        for field, rows in enumerate(job.table_rows):
            features.features[f"C{field + 1}"] = {"source": "", "type": "categorical", "vocab_size": rows}
        for number in range(job.num_dense):
            features.features[f"I{number + 1}"] = {"source": "", "type": "numeric"}
        features.num_fields = features.get_num_fields()
        self.model = DeepFM(features, folder)
        # Set by `fit` before its first step.
        self.model._max_gradient_norm = 10.0
        self.model.train()

    def batch(self, dense: np.ndarray, ids: np.ndarray, label: np.ndarray) -> tuple[dict[str, Tensor]]:
        columns = {f"C{field + 1}": torch.from_numpy(field_ids) for field, field_ids in enumerate(ids)}
        columns |= {f"I{n + 1}": torch.from_numpy(values) for n, values in enumerate(dense.T.copy())}
        return (columns | {LABEL: torch.from_numpy(label)},)

    def step(self, columns: dict[str, Tensor]) -> None:
        self.model.train_step(columns).item()


if __name__ == "__main__":
    work(FuxiCTR, ["fuxictr", "torch"])
