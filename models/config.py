"""The ``[model]`` section, and the check of the options that a configuration gives to a network or a loss."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from cowrec.errors import UserError
from cowrec.names import hint, nearest_name

Size: TypeAlias = Annotated[int, Field(ge=1)]
"""Type of an option that is at least 1."""
Sizes: TypeAlias = Annotated[tuple[Size, ...], Field(min_length=1)]
"""Type of an option that lists at least one size."""


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a network; the defaults are the CowClip paper's.

    Attributes:
        name: network: a key of ``MODELS``, or "module:Class" for a network of your own; see docs/models.md.
        embedding_dim: width D of the embedding of a field, without the wide weight that is stored beside it.
        hidden: widths of the ReLU layers of the MLP.
        dropout: share of activations that is dropped after each of these layers while training, in [0, 1).
        options: sizes that only this network has, as a table `[model.options]`; docs/models.md lists them.
        embedding_dims: other widths of single fields, such as `{ city = 3, user = 31 }`. The network projects their
            embeddings to embedding_dim. Fields that share a table have one width. A stored row is padded to a multiple
            of 4: widths of 3, 7, 11 and so on, plus the wide weight, need no padding.
    """

    name: str = "deepfm"
    embedding_dim: int = 10
    hidden: tuple[int, ...] = (400, 400, 400)
    dropout: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    embedding_dims: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.embedding_dim < 1:
            raise UserError(f"model.embedding_dim must be at least 1, got {self.embedding_dim}")
        for name, width in self.embedding_dims.items():
            if width < 1:
                raise UserError(f"model.embedding_dims.{name} must be at least 1, got {width}")
        if not self.hidden or min(self.hidden) < 1:
            raise UserError(
                f"model.hidden must list at least one layer width, each at least 1, got {list(self.hidden)}; "
                "the paper's is [400, 400, 400]"
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.dropout must be in [0, 1), got {self.dropout}; 0 turns it off")

    def widths(self, fields: Sequence[str]) -> list[int]:
        """Width of each field's embedding. Raises ValueError if :attr:`embedding_dims` names what is not a field."""
        for name in self.embedding_dims:
            if name not in fields:
                meant = hint(name, fields, "sparse fields")
                raise UserError(f"model.embedding_dims names {name!r}, which is not a sparse field; {meant}")
        return [self.embedding_dims.get(name, self.embedding_dim) for name in fields]


def checked_options(
    function: Callable[..., Any], given: Mapping[str, Any], table: str, owner: str, *, first: int, reserved: str = ""
) -> dict[str, Any]:
    """Checks options of a TOML file against the parameters of a function; returns them, with tuples for lists.

    Args:
        table, owner: name of the options' table, and name of the network or loss, for messages.
        first: number of leading parameters that are not options.
        reserved: name of a further parameter that is not an option.

    Raises ValueError: an option is unknown or missing, or its value has another type than the parameter's annotation.
    """
    parameters = list(inspect.signature(function).parameters.values())
    positional = [parameter for parameter in parameters if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    by_keyword = [parameter for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    options = {
        parameter.name: parameter for parameter in (*positional[first:], *by_keyword) if parameter.name != reserved
    }
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    try:
        types = get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)
    except NameError:  # a name that is imported for type checkers only
        types = {}
    checked = {}
    for key, value in given.items():
        if key not in options and not takes_any:
            nearest = nearest_name(key, options)
            takes = f"it takes {', '.join(options)}" if options else "it takes none"
            remedy = f"did you mean {table}.{nearest}?" if nearest else takes
            raise UserError(f"{owner} has no option {key} ({table}.{key} = {value!r}); {remedy}")
        checked[key] = _converted(value, types.get(key, Any), f"{table}.{key}")
    for name, option in options.items():
        if option.default is inspect.Parameter.empty and name not in given:
            raise UserError(f"{owner} needs {table}.{name}, which has no default; set it")
    return checked


def _converted(value: Any, kind: Any, key: str) -> Any:
    """Converts a value to its annotation. As in the configuration, an integer is a float too, and a list a tuple."""
    try:
        return TypeAdapter(kind).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise UserError(f"{key} = {value!r}: {message[:1].lower()}{message[1:]}") from None
