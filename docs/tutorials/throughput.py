"""Throughput: a larger batch without loss of quality, and how to see both.

Run this script with `python docs/tutorials/throughput.py [FOLDER]`. It takes some seconds. FOLDER keeps its files.
"""

import sys
import tempfile
from pathlib import Path

from cowrec.data_pipeline import SynthesizeConfig, synthesize
from cowrec.trainer import load_config, train

# %% These values suit the base batch size of 64. For your data, `cowrec tune` finds such values.

RUN = """
[model]
hidden = [32]

[train]
epochs = 1
eval_batch_size = 4096

[optimizer]
base_batch_size = 64
embedding_lr = 1e-3
dense_lr = 1e-3
l2 = 1e-4
warmup_epochs = 0.2
"""


def main(folder: Path) -> None:
    (folder / "run.toml").write_text(RUN)

    # %% The clicks are synthetic and have Criteo's shape. Their best possible AUC is known.
    schema = synthesize(folder / "data", SynthesizeConfig(rows=40_000, test_rows=5_000, vocabulary_scale=1e-4))
    assert schema.best is not None
    print(f"best possible AUC {schema.best['auc']:.4f}")

    # %% train.batch_size is the one setting to change. The rule optimizer.scaling converts the other values. Under the
    # rule "none" they stay as they are, which shows what happens to a model if only its batch grows.
    for batch_size, rule in ((64, "half_life"), (512, "half_life"), (512, "none")):
        config = load_config(folder / "run.toml", [f"train.batch_size={batch_size}", f"optimizer.scaling={rule}"])
        report = train(config, folder / "data", folder / f"{rule}_{batch_size}")
        print(
            f"batch {batch_size:5}, rule {rule:9}: AUC {report['auc']:.4f}, logloss {report['logloss']:.4f},"
            f" {report['samples_per_second']:8,.0f} samples/s in {report['steps']} steps"
        )

    # %% Next, `cowrec plot FOLDER/*_*` draws the curves of these runs, `cowrec sweep` trains such a grid with several
    # seeds, and `cowrec bench` measures the parts of a step at the size of your tables.


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
