"""DeepCTR's DeepFM on TensorFlow with Keras' Adam: L2 on all tables in the loss, no clip."""

import os

import numpy as np

# DeepCTR requires Keras 2, which TensorFlow no longer includes since 2.16.
os.environ["TF_USE_LEGACY_KERAS"] = "1"

import tensorflow as tf
from deepctr.feature_column import DenseFeat, SparseFeat
from deepctr.models import DeepFM

from .timed_steps import EMBEDDING_DIM, HIDDEN, L2, Job, work


class DeepCTR:
    def __init__(self, job: Job) -> None:
        columns = [SparseFeat(f"C{f + 1}", rows, EMBEDDING_DIM) for f, rows in enumerate(job.table_rows)]
        columns += [DenseFeat(f"I{n + 1}", 1) for n in range(job.num_dense)]
        self.model = DeepFM(columns, columns, dnn_hidden_units=HIDDEN, l2_reg_linear=L2, l2_reg_embedding=L2)
        self.model.compile("adam", "binary_crossentropy")

    def batch(self, dense: np.ndarray, ids: np.ndarray, label: np.ndarray) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        columns = {f"C{field + 1}": tf.constant(field_ids) for field, field_ids in enumerate(ids)}
        columns |= {f"I{n + 1}": tf.constant(values) for n, values in enumerate(dense.T.copy())}
        return columns, tf.constant(label)

    def step(self, columns: dict[str, tf.Tensor], label: tf.Tensor) -> None:
        self.model.train_on_batch(columns, label)


if __name__ == "__main__":
    work(DeepCTR, ["deepctr", "tensorflow-cpu", "tf-keras"])
