"""The running mean of the weights: torch's AveragedModel is the oracle, and training does not notice the mean."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from cowrec.trainer.training.weight_average import WeightAverage
from refusal import refused
from run_comparison import state_of
from trained_runs import data_folder, report_of, run

folder = data_folder("price", "city")


def test_the_mean_is_that_of_torch() -> None:
    """The k-th state enters torch's mean with the share 5 / (k + 4)."""

    def later_count_more(mean: Tensor, now: Tensor, count: Tensor | int) -> Tensor:
        return mean + 5 / (int(count) + 1 + 4) * (now - mean)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    oracle, average = AveragedModel(model, avg_fn=later_count_more, use_buffers=True), WeightAverage(model)
    for _ in range(7):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter))
        oracle.update_parameters(model)
        average.add()
    last = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with average.shown():
        torch.testing.assert_close(model.state_dict(), oracle.module.state_dict(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model.state_dict(), last, rtol=0, atol=0)


def test_rows_that_pass_to_other_ids_have_no_mean(folder: Path, tmp_path: Path) -> None:
    settings = ["train.average=true", "id_table.kind=collisionless"]
    refused("does not work with collisionless id tables: a row that", run, folder, tmp_path / "run", *settings)


def test_training_does_not_notice_the_mean(folder: Path, tmp_path: Path) -> None:
    """The last weights are those of a run without the mean. All five steps of each epoch enter the mean."""
    settings = ["optimizer.absent_rows=lazy", "train.epochs=2"]
    run(folder, tmp_path / "plain", *settings, "train.average=false")
    run(folder, tmp_path / "average", *settings)
    plain, averaged = (state_of(tmp_path / name) for name in ("plain", "average"))
    assert averaged.keys() - plain.keys() == {
        "/averaged",
        *(f"/average/{key[7:]}" for key in plain if "/model/" in key),
    }
    for key, value in plain.items():
        assert torch.equal(averaged[key], value), key
    assert averaged["/averaged"] == 10
    assert report_of(tmp_path / "plain")["logloss"] != report_of(tmp_path / "average")["logloss"]
