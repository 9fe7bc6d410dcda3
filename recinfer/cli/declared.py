"""Declares the options of a command as fields of frozen dataclasses."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, get_type_hints

__all__ = ["settings", "takes", "takes_groups"]

C = TypeVar("C")  # the class of a configuration
O = TypeVar("O")  # noqa: E741 - the class of options


def takes(options: type[O]) -> Callable[[Callable[[O], None]], Callable[..., None]]:
    """Turn a function of one options object into a command; typer sees one parameter per field.

    Args:
        options: a dataclass whose fields are declared like typer parameters,
            ``port: Annotated[int, typer.Option(help="...")] = 8500``. A field whose type is a dataclass is a group: its
            fields are parameters too. A group's ``PANEL``, a class variable, is the heading of its options in ``--help``.
    """
    parameters = list(_parameters(options))

    def decorate(function: Callable[[O], None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**given: Any) -> None:
            function(_build(options, given))

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def takes_groups(function: Callable[..., None]) -> Callable[..., None]:
    """Turn each parameter of a command whose type is a dataclass into the options of its fields, declared as for :func:`takes`."""
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        one = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        parameters += _parameters(groups[name]) if name in groups else [one]

    @functools.wraps(function)
    def run(**given: Any) -> None:
        built = {name: _build(group, given) for name, group in groups.items()}
        function(**{name: built[name] if name in built else given[name] for name in hints if name != "return"})

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters(options: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(options, include_extras=True)
    panel: str | None = getattr(options, "PANEL", None)
    for field in dataclasses.fields(options):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _parameters(hint)
            continue
        for option in hint.__metadata__ if panel is not None else ():
            option.rich_help_panel = panel
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _build(options: Any, given: Mapping[str, Any]) -> Any:
    hints = get_type_hints(options)
    return options(
        **{
            field.name: _build(hints[field.name], given)
            if dataclasses.is_dataclass(hints[field.name])
            else given[field.name]
            for field in dataclasses.fields(options)
        }
    )


def settings(config: type[C], options: object, **changed: Any) -> C:
    """Build a configuration from options.

    Args:
        config: a dataclass; each field has the value of the option of its name, or else its default.
        changed: fields whose option has another name or type.
    """
    fields = [field.name for field in dataclasses.fields(config)]  # type: ignore[arg-type]
    given = {name: getattr(options, name) for name in fields if hasattr(options, name)}
    return config(**{**given, **changed})
