"""The networks by name, and their construction from a configuration."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cowrec.errors import UserError

from .config import ModelConfig, checked_options
from .front import EmbeddingFront, Front, LookedUpFront, SequenceField
from .networks.autoint import AutoInt
from .networks.dcn import DCN, DCNMix, DCNv2
from .networks.deepfm import FM, DeepFM, WideDeep
from .networks.dlrm import DLRM
from .networks.fcn import FCN
from .networks.finalmlp import FinalMlp
from .networks.finalnet import FinalNet
from .networks.histories import BST, DIN, HSTU
from .networks.masknet import ParallelMaskNet, SerialMaskNet
from .networks.multi_task import PLE, MMoE, SharedBottom
from .networks.xdeepfm import XDeepFM
from .own_code import chosen, is_import_path, tried

if TYPE_CHECKING:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig

MODELS: dict[str, type[nn.Module]] = {
    "wdl": WideDeep,
    "deepfm": DeepFM,
    "dcn": DCN,
    "dcnmix": DCNMix,
    "dcnv2": DCNv2,
    "fm": FM,
    "dlrm": DLRM,
    "xdeepfm": XDeepFM,
    "autoint": AutoInt,
    "masknet_serial": SerialMaskNet,
    "masknet_parallel": ParallelMaskNet,
    "finalmlp": FinalMlp,
    "finalnet": FinalNet,
    "fcn": FCN,
    "din": DIN,
    "bst": BST,
    "hstu": HSTU,
    "shared_bottom": SharedBottom,
    "mmoe": MMoE,
    "ple": PLE,
}


def require_model(config: ModelConfig) -> None:
    """Checks the network's name and options; imports the module of a network of your own.

    Raises ValueError: the name is neither in ``MODELS`` nor the name of a network's class, or an option does not fit.
    """
    _class_and_options(config)


def all_options(config: ModelConfig) -> dict[str, object]:
    """Returns all options of the network, with the defaults of those that are not given."""
    network, given = _class_and_options(config)
    parameters = list(inspect.signature(network).parameters.values())[2:]
    return {parameter.name: parameter.default for parameter in parameters if parameter.name != _TASKS} | given


def build_model(
    config: ModelConfig,
    tables: Sequence["EmbeddingBagConfig"],
    num_dense: int,
    *,
    is_weighted: bool = False,
    fields: Sequence[str] | None = None,
    sequences: Mapping[str, SequenceField] | None = None,
    num_tasks: int = 1,
    device: torch.device | None = None,
) -> nn.Module:
    """Builds the network ``config.name`` on the given tables.

    The dense part is initialised as in the CowClip reference, from torch's global generator. The caller chooses the
    tables' initial values (``EmbeddingBagConfig.init_fn``); columns after the wide weight should be zero.

    Args:
        tables, num_dense, is_weighted, fields, sequences: as in :class:`EmbeddingFront`.
        num_tasks: number of labels T.
        device: by default the CPU. On the meta device, sharding allocates the tables; the dense part is on the CPU.

    Returns a module ``forward(dense float [B, N], sparse KeyedJaggedTensor) -> logits float [B]``, or [B, T] of T > 1
    tasks. Sharding replaces the module's one EmbeddingBagCollection, ``front.embeddings``.

    Raises ValueError: a name, field or option is unknown, the network has one task and the data have several, the
    tables do not fit the configuration, or a network of your own is not as docs/models.md describes.
    """
    require_model(config)
    front = EmbeddingFront(
        tables,
        config.embedding_dim,
        num_dense,
        embedding_dims=config.embedding_dims,
        is_weighted=is_weighted,
        fields=fields,
        sequences=sequences,
        device=device,
    )
    looked_up = _looked_up_front(config, front.fields, num_dense, sequences)
    if is_import_path(config.name):
        # Tried on a few samples, without changing the random numbers of the run.
        with torch.random.fork_rng(devices=[]):
            _check_network(config.name, lambda: _network(config, looked_up, num_tasks), looked_up, num_tasks)
    model = _network(config, front, num_tasks)
    if device is not None and device.type != "meta":
        model.to(device)
    return model


def build_network(
    config: ModelConfig,
    fields: Sequence[str],
    num_dense: int,
    num_tasks: int = 1,
    sequences: Mapping[str, SequenceField] | None = None,
) -> nn.Module:
    """Builds the network ``config.name`` without tables, for rows that are looked up and pooled elsewhere.

    Returns:
        A module on the CPU, ``forward(dense float [B, N], rows) -> logits float [B]``, or [B, T] of T > 1 tasks, with
        rows as in :meth:`LookedUpFront.forward`. The parameters have the same names as in :func:`build_model`'s module.
    """
    return _network(config, _looked_up_front(config, fields, num_dense, sequences), num_tasks)


def _check_network(name: str, build: Callable[[], Any], front: LookedUpFront, num_tasks: int) -> None:
    """Tries a network of the user's own on three samples in training and on one in evaluation.

    Raises ValueError if the network does not keep the front, fails, does not return one logit for each sample and task,
    or computes logits that do not depend on the embeddings or are not finite for a sample without a history.
    """
    given = f'model.name = "{name}"'
    hint = "in the check the ids are looked up already, so that sparse can only be passed to self.front"
    network = tried(given, "making it with (config, front)", build, hint)
    if not any(module is front for module in network.modules()):
        raise UserError(f"{given} does not keep the front that it is given; write self.front = front in its __init__")
    rows = torch.rand(3, front.num_keys, front.row_width, requires_grad=True)
    longest = torch.tensor([len(sequence.keys) for sequence in front.sequences.values()], dtype=torch.int64)
    lengths = torch.stack([longest, longest * 0, longest.clamp(max=1)])

    def forward(training: bool, *inputs: Any) -> Tensor:
        logits: Tensor = network.train(training)(*inputs)
        return logits

    for samples in (3, 1):
        what = f"its forward(dense, sparse) on {samples} sample{'s' if samples > 1 else ''}"
        dense, some = torch.rand(samples, front.num_dense), rows[:samples]
        looked_up = (some, lengths[:samples]) if front.sequences else some
        logits = tried(given, what, partial(forward, samples > 1, dense, looked_up), hint)
        shape = [samples, num_tasks] if num_tasks > 1 else [samples]
        found = f"{list(logits.shape)} of {logits.dtype}" if isinstance(logits, Tensor) else type(logits).__name__
        if found != f"{shape} of torch.float32":
            remedy = "for a last dimension of one return logits.squeeze(1)" if "1]" in found else "see docs/models.md"
            raise UserError(
                f"{given}: {what} returned {found} instead of one logit for each"
                f" {'sample and task' if num_tasks > 1 else 'sample'}, float32 {shape}; {remedy}"
            )
        trained = [rows, *(parameter for parameter in network.parameters() if parameter.requires_grad)]
        used = logits.requires_grad and torch.autograd.grad(logits.sum(), trained, allow_unused=True)
        if not used or used[0] is None:
            raise UserError(
                f"{given} computes logits that do not depend on the embeddings, so that no table would be trained;"
                " compute them from self.front(dense, sparse), without detach()"
            )
        if front.sequences and not all(values.isfinite().all() for values in (logits, *used) if values is not None):
            raise UserError(
                f"{given}: {what} returned logits or gradients that are not finite for a sample without a history, as"
                " requests and the padding of torchrun have; mask with -1e9 instead of -inf, and multiply by the mask"
            )


def _looked_up_front(
    config: ModelConfig, fields: Sequence[str], num_dense: int, sequences: Mapping[str, SequenceField] | None
) -> LookedUpFront:
    return LookedUpFront(fields, config.widths(fields), config.embedding_dim, num_dense, sequences)


def _network(config: ModelConfig, front: Front, num_tasks: int) -> nn.Module:
    network, options = _class_and_options(config)
    if _takes_tasks(network):
        return network(config, front, **options, **{_TASKS: num_tasks})
    if num_tasks > 1:
        known = ", ".join(name for name, network in MODELS.items() if _takes_tasks(network))
        raise UserError(
            f'model.name = "{config.name}" computes one logit, but the data have {num_tasks} labels; choose one of'
            f" {known} or a network of your own with a parameter {_TASKS}, or prepare data with one label"
        )
    return network(config, front, **options)


def _takes_tasks(network: type[nn.Module]) -> bool:
    return _TASKS in inspect.signature(network).parameters


def _class_and_options(config: ModelConfig) -> tuple[type[nn.Module], dict[str, object]]:
    name = config.name
    network = chosen("model.name", name, MODELS, 'a network of your own is "module:Class"')
    owner = f'model.name = "{name}"'
    if not (inspect.isclass(network) and issubclass(network, nn.Module)):
        kind = f"the class {network.__name__}" if inspect.isclass(network) else f"of type {type(network).__name__}"
        raise UserError(
            f"{owner} is {kind}, not a subclass of torch.nn.Module; name a class such as docs/models.md has"
        )
    return network, checked_options(network, config.options, "model.options", owner, first=2, reserved=_TASKS)


_TASKS = "num_tasks"
"""Parameter of networks of several tasks."""
