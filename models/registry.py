"""The networks by name, and their construction from a configuration."""

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from cowrec.errors import UserError

from .config import ModelConfig
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
from .options import checked_options
from .own_code import check_network, chosen, is_import_path

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
    """Checks the network's name and its options; imports the module of a network of your own.

    Raises:
        ValueError: the name is neither in ``MODELS`` nor that of a class that is a network, or an option does not fit.
    """
    _class_and_options(config)


def all_options(config: ModelConfig) -> dict[str, object]:
    """The options of the network, also those that have their defaults."""
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

    Its dense part is initialised as in the CowClip reference, from torch's global generator. The caller chooses the
    tables' initial values (``EmbeddingBagConfig.init_fn``); columns after the wide weight should be zero.

    Args:
        tables: of width ``physical_dim(D)``, or of a field's own width in ``config.embedding_dims``; their feature
            names are the fields, and the keys of sequences.
        num_dense: number of dense features N; 0 is fine.
        is_weighted: whether the ids carry weights; all tables are then pooled by sum.
        fields: the order in which the network sees them; by default that of the tables.
        sequences: fields that are sequences, which ``fields`` must list.
        num_tasks: number of labels T.
        device: where everything is built, by default the CPU. With the meta device only the tables are there, so that
            sharding allocates them, and the dense part is on the CPU.

    Returns:
        A module ``forward(dense float [B, N], sparse KeyedJaggedTensor) -> logits float [B]``, or [B, T] of T > 1
        tasks. Sharding replaces its one EmbeddingBagCollection, ``front.embeddings``.

    Raises:
        ValueError: an unknown name, field or option, a network of one task for several, tables that do not fit the
            configuration, or a network of your own that is not as docs/models.md describes.
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
            check_network(config.name, lambda: _network(config, looked_up, num_tasks), looked_up, num_tasks)
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
    """Builds the network ``config.name`` without its tables, for rows that are looked up and pooled elsewhere.

    Returns:
        A module on the CPU, ``forward(dense float [B, N], rows float [B, F, P]) -> logits float [B]``, or [B, T] of T >
        1 tasks, where P is the stored width of the widest field. With sequences, it takes ``(rows, lengths)`` in place
        of the rows: a row for each key, [B, K, P], zeros where there is no id, and the lengths int [B, sequences]. Its
        parameters have the names they have in :func:`build_model`'s.
    """
    return _network(config, _looked_up_front(config, fields, num_dense, sequences), num_tasks)


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
