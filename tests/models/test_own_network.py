"""A network or loss of a user's own that is not as it has to be: problem, value and remedy."""

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrec.models.dlrm
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.data_pipeline import SparseField
from cowrec.models import ModelConfig, build_model, loss_of, physical_dim, require_model
from cowrec.trainer.runs.run_dir import own_code
from refusal import refused

MODULE = """
import torch
from torch import nn
from my_part import Part

class Net(nn.Module):
    def __init__(self, config, front, width: int = 2, *, names: tuple[str, ...] = ()):
        super().__init__()
        self.front, self.part, self.kernel = front, Part(), nn.Parameter(torch.ones(front.width, width))

    def forward(self, dense, sparse):
        return self.logits(self.front(dense, sparse))

    def logits(self, x):
        return (x.flat @ self.kernel).sum(1)

def net(logits):
    return type("Other", (Net,), {"logits": logits})

Column = net(lambda self, x: (x.flat @ self.kernel)[:, :1])
Squeezed = net(lambda self, x: (x.flat @ self.kernel)[:, :1].squeeze())
Detached = net(lambda self, x: (x.flat.detach() @ self.kernel).sum(1))

class NoFront(Net):
    def __init__(self, config, front):
        nn.Module.__init__(self)
        self.kernel = nn.Parameter(torch.ones(1))

class Needs(Net):
    def __init__(self, config, front, *, heads: int):
        super().__init__(config, front)

class NoInit(nn.Module):
    def forward(self, dense, sparse):
        return dense

class Tasks(nn.Module):
    def __init__(self, config, front, num_tasks):
        super().__init__()
        self.front, self.out = front, nn.Linear(front.width, num_tasks)

    def forward(self, dense, sparse):
        return self.out(self.front(dense, sparse).flat)

class Histories(Net):
    def __init__(self, config, front, *, masked: float):
        super().__init__(config, front)
        self.masked = masked

    def logits(self, x):
        rows, mask = x.sequences["clicks"]
        weight = rows.sum(2).masked_fill(~mask, self.masked).softmax(1) * mask
        return super().logits(x) + (weight[..., None] * rows).sum((1, 2))

class OneOfTasks(Tasks):
    def forward(self, dense, sparse):
        return super().forward(dense, sparse).sum(1)

class Plain: pass

mean = lambda logits, label: nn.functional.mse_loss(logits, label)
mean_of_tasks = lambda logits, label: (logits - label).square().mean(1)

def scaled(logits, label, *, scale: float = 1.0):
    return scale * (logits - label) ** 2

number = 3
"""

DIM = 3


def tables() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=f"t{i}", feature_names=[f"C{i}"], num_embeddings=5, embedding_dim=physical_dim(DIM))
        for i in range(3)
    ]


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in {
        "my_module": MODULE,
        "my_part": "from torch import nn\nfrom my_deeper import anything\nclass Part(nn.Module):\n    pass\n",
        "my_deeper": "def anything(): ...\n",
        "my_broken": "import torch\n\n1 / 0\n",
        "my_import": "import there_is_no_such_package\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


def config(name: str, **options: Any) -> ModelConfig:
    return ModelConfig(name=name, embedding_dim=DIM, options=options)


def test_a_network_of_ones_own_is_built_with_its_options() -> None:
    torch.manual_seed(0)
    model = build_model(config("my_module:Net", width=3, names=["a", "b"]), tables(), 2)
    assert model.kernel.shape == (3 * DIM + 2, 3)
    dense, ids = torch.rand(9, 2), torch.randint(5, (27,))
    sparse = KeyedJaggedTensor(keys=["C0", "C1", "C2"], values=ids, lengths=torch.ones_like(ids))
    x = model.front(dense, sparse)
    torch.testing.assert_close(model(dense, sparse), 3 * x.flat.sum(1), rtol=1e-5, atol=1e-5)
    build_model(config("my_module:Tasks"), tables(), 2, num_tasks=3)


def test_files_that_a_module_uses_are_listed(module: Path) -> None:
    require_model(config("my_module:Net"))
    found = own_code("model.name", "my_module:Net")
    assert found.folder == str(module)
    assert list(found.files) == ["my_deeper.py", "my_module.py", "my_part.py"]


def test_of_an_installed_package_only_its_own_files_are_listed() -> None:
    found = own_code("model.name", f"{torchrec.models.dlrm.__name__}:DLRM")
    assert (Path(found.folder) / "torchrec").is_dir()
    assert {Path(file).parts[0] for file in found.files} == {"torchrec"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_absent:Net", r"there is no module my_absent .*current folder .*; add the folder that has my_absent.py to"),
        ("my_module.inner:Net", "there is no module my_module.inner"),
        ("my_module:", 'must be "MODULE:NAME"'),
        ("my_broken:Net", r"importing it failed \(\S*my_broken.py:3\): ZeroDivisionError"),
        ("my_import:Net", r"my_import.py:1\): .*No module named 'there_is_no_such_package'"),
        ("my_module:Plain", "is the class Plain, not a subclass of torch.nn.Module"),
        ("my_module:NoInit", r"making it with \(config, front\) failed.*: TypeError: "),
        ("my_module:Needs", "needs model.options.heads, which has no default"),
        ("my_module:NoFront", r"does not keep the front .*self.front = front"),
        ("my_module:Column", r"on 3 samples returned \[3, 1\] of torch.float32 .*return logits.squeeze\(1\)"),
        ("my_module:Squeezed", r"on 1 sample returned \[\] .* of one logit for each sample, float32 \[1\]"),
        ("my_module:Detached", "do not depend on the embeddings"),
    ],
)
def test_a_network_that_does_not_work_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build_model(config(name), tables(), 2)
    assert f'model.name = "{name}"' in str(caught.value)


def test_a_network_gives_a_sample_without_a_history_a_finite_logit() -> None:
    clicks = SparseField("clicks", 5, kind="sequence", max_length=4)
    table = EmbeddingBagConfig(
        name="t", feature_names=list(clicks.keys), num_embeddings=5, embedding_dim=physical_dim(DIM)
    )
    given = {"fields": ["clicks"], "sequences": {"clicks": clicks}}
    build_model(config("my_module:Histories", masked=-1e9), [table], 2, **given)
    own = config("my_module:Histories", masked=-math.inf)
    refused("not finite for a sample without a history, .* mask with -1e9", build_model, own, [table], 2, **given)


OPTIONS = [
    ({"widths": 3}, r'"my_module:Net" has no option widths .*did you mean model.options.width[?]'),
    ({"width": "3"}, "model.options.width = '3': input should be a valid integer"),
]
LOSSES = [
    ("bcee", {}, r'train.loss is "bcee"; did you mean "bce"[?] known: bce, focal'),
    ("focal", {"gamma": math.inf}, "train.loss_options.gamma = inf: input should be a finite number"),
    ("my_module:mean", {}, r"returned \[\] for logits .*reduction=\"none\""),
    ("my_module:number", {}, "is of type int, not a function"),
    ("my_module:scaled", {"scales": 2}, r"did you mean train.loss_options.scale[?]"),
]
TASKS = [
    ("my_module:OneOfTasks", 2, r"returned \[3\].* one logit for each sample and task, float32 \[3, 2\]"),
    ("my_module:Tasks", 1, r"returned \[3, 1\] .*one logit for each sample, float32 \[3\]; .*squeeze"),
]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((partial(require_model, config("my_module:Net", **options)), text) for options, text in OPTIONS),
        *((partial(loss_of, name, options), message) for name, options, message in LOSSES),
        *((partial(build_model, config(name), tables(), 2, num_tasks=n), message) for name, n, message in TASKS),
        (partial(loss_of, "my_module:mean_of_tasks", {}, 2), r"returned \[3\] for logits and labels of shape \[3, 2\]"),
    ],
)
def test_wrong_options_losses_and_tasks_are_refused(call: Callable[[], object], message: str) -> None:
    refused(message, call)


def test_losses_of_ones_own_take_options() -> None:
    logits, label = torch.tensor([1.0, -2.0]), torch.tensor([1.0, 0.0])
    assert loss_of("my_module:scaled", {"scale": 2})(logits, label).tolist() == [0.0, 8.0]


@pytest.mark.parametrize(
    ("options", "weights"),
    [({}, (1.0, 1.0)), ({"gamma": 0.0}, (1.0, 1.0)), ({"gamma": 0.5, "alpha": 0.25}, (0.25, 0.75))],
)
def test_focal_loss_is_the_formula(options: dict[str, float], weights: tuple[float, float]) -> None:
    """In float64; at large logits the gradient stays finite, also for gamma below 1."""
    logits = torch.linspace(-6, 6, 13, dtype=torch.float64)
    for label, weight in ((1.0, weights[0]), (0.0, weights[1])):
        p = torch.sigmoid(logits if label else -logits)
        expected = -weight * (1 - p) ** options.get("gamma", 2.0) * torch.log(p)
        found: Callable[..., Any] = loss_of("focal", options)
        torch.testing.assert_close(found(logits, torch.full_like(logits, label)), expected)
    extreme = torch.tensor([500.0, -500.0], requires_grad=True)
    loss_of("focal", options)(extreme, torch.tensor([1.0, 1.0])).sum().backward()
    assert extreme.grad.isfinite().all()
