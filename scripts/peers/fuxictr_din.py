"""DIN of FuxiCTR's layers, which the package has without the model, trained on a prepared data set with a history.

Its Adam has dense gradients, its gradient clip is one norm over all parameters. Its early stopping and its lower rate
after an epoch that is no better are left out.
"""

import tempfile
from collections.abc import Callable
from typing import Any

from fuxictr.features import FeatureMap
from fuxictr.pytorch.layers import DIN_Attention, FeatureEmbeddingDict, MLP_Block
from fuxictr.pytorch.models import BaseModel
from torch import Tensor, nn

from .histories import LABEL, Samples, work


class DIN(BaseModel):
    """The fields' embeddings, of the history those that the item attends to, then an MLP."""

    def __init__(self, features: FeatureMap, folder: str, job: dict[str, Any]) -> None:
        super().__init__(features, verbose=0, model_root=folder, metrics=["AUC"])
        width = job["embedding_dim"]
        self.item, self.history = job["item"], job["history"]
        self.embeddings = FeatureEmbeddingDict(features, width)
        self.attention = DIN_Attention(width, [job["attention"]], hidden_activations=job["activation"])
        inputs, last = len(features.features) * width, self.output_activation
        self.mlp = MLP_Block(inputs, job["hidden"], output_dim=1, output_activation=last)
        self.compile("adam", "binary_crossentropy", lr=1e-3)
        self.reset_parameters()
        self._max_gradient_norm = 10.0  # set by `fit` before its first step

    def forward(self, inputs: Samples) -> Samples:
        fields = self.get_inputs(inputs)
        embedded = self.embeddings(fields)
        mask = fields[self.history] != 0
        embedded[self.history] = self.attention(embedded[self.item], embedded[self.history], mask)
        return {"y_pred": self.mlp(self.embeddings.dict2tensor(embedded, flatten_emb=True))}


def build(fields: list[dict[str, Any]], job: dict[str, Any]) -> tuple[nn.Module, Callable[[Samples], Any]]:
    folder = tempfile.gettempdir()
    features = FeatureMap("histories", folder)
    features.labels = [LABEL]
    for field in fields:
        kind = {"type": "sequence", "share_embedding": field["shares"]} if field["shares"] else {"type": "categorical"}
        features.features[field["name"]] = {"source": "", "vocab_size": field["num_embeddings"] + 1, **kind}
        features.features[field["name"]] |= {"padding_idx": 0} if field["name"] in (job["item"], job["history"]) else {}
    features.num_fields = features.get_num_fields()
    model = DIN(features, folder, job)
    return model, lambda samples: model.train_step(samples).item()


def predict(model: nn.Module, samples: Samples) -> Tensor:
    predicted: Tensor = model(samples)["y_pred"]
    return predicted


if __name__ == "__main__":
    work(build, predict, ["fuxictr", "torch"])
