"""Options of a network or loss: keys of a TOML table that become keyword arguments, checked against the signature."""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from cowrec.errors import UserError
from cowrec.names import nearest_name

Size: TypeAlias = Annotated[int, Field(ge=1)]
"""Type of an option that is at least 1."""
Sizes: TypeAlias = Annotated[tuple[Size, ...], Field(min_length=1)]
"""Type of an option that lists at least one size."""


def checked_options(
    function: Callable[..., Any], given: Mapping[str, Any], table: str, owner: str, *, first: int, reserved: str = ""
) -> dict[str, Any]:
    """Checks options against the parameters of a function, and converts lists to the tuples that it asks for.

    Args:
        given: the options, as a TOML file gives them.
        table, owner: name of their table, and what has the options, for messages.
        first: number of leading parameters that are no options.
        reserved: a further parameter that is none.

    Returns:
        Keyword arguments: the given options alone.

    Raises:
        ValueError: an unknown or missing option, or a value of another type than its annotation says.
    """
    parameters = list(inspect.signature(function).parameters.values())
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [parameter for parameter in parameters if parameter.kind in by_position]
    known = [
        *positional[first:],
        *(parameter for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY),
    ]
    options = {parameter.name: parameter for parameter in known if parameter.name != reserved}
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
            hint = f"did you mean {table}.{nearest}?" if nearest else takes
            raise UserError(f"{owner} has no option {key} ({table}.{key} = {value!r}); {hint}")
        checked[key] = _converted(value, types.get(key, Any), f"{table}.{key}")
    for name, option in options.items():
        if option.default is inspect.Parameter.empty and name not in given:
            raise UserError(f"{owner} needs {table}.{name}, which has no default; set it")
    return checked


def _converted(value: Any, kind: Any, key: str) -> Any:
    """The value as its annotation says; as in the configuration, an integer is a float too, and a list a tuple."""
    try:
        return TypeAdapter(kind).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise UserError(f"{key} = {value!r}: {message[:1].lower()}{message[1:]}") from None
