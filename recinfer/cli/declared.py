"""The options of a verb as fields of frozen dataclasses, declared as data and apart from what is done with them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, get_type_hints

__all__ = ["takes"]

O = TypeVar("O")  # noqa: E741 - of options


def takes(options: type[O]) -> Callable[[Callable[[O], None]], Callable[..., None]]:
    """Make a verb of a function on its options: typer sees a parameter for each of their fields.

    Args:
        options: a dataclass whose fields are declared as typer wants parameters,
            ``port: Annotated[int, typer.Option(help="...")] = 8500``. A field whose type is a dataclass is a group: its
            fields are parameters too.
    """
    parameters = list(_parameters(options))

    def decorate(function: Callable[[O], None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**given: Any) -> None:
            function(_built(options, given))

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _parameters(options: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(options, include_extras=True)
    for field in dataclasses.fields(options):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _parameters(hint)
            continue
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _built(options: Any, given: Mapping[str, Any]) -> Any:
    hints = get_type_hints(options)
    return options(
        **{
            field.name: _built(hints[field.name], given)
            if dataclasses.is_dataclass(hints[field.name])
            else given[field.name]
            for field in dataclasses.fields(options)
        }
    )
