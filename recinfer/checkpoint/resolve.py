"""Calls the functions that ``--model pkg.module:function`` and ``--inputs`` name, and reads files of example batches."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recinfer.errors import ConfigError, InputError, NotFoundError, UnavailableError

__all__ = ["resolve_inputs", "resolve_model"]


def resolve_model(spec: str) -> nn.Module:
    """Import ``pkg.module`` (the working directory counts) and call its ``function`` with no arguments.

    The function returns the module; build embedding tables with ``device="meta"``, so that they cost no memory. The
    call runs the user's code.

    Raises:
        ConfigError: not of the form ``pkg.module:function``, or the function does not return a module.
        NotFoundError: no such module or function.
        UnavailableError: the user's module imports a package that is not installed.
    """
    model = _call("--model", spec)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model {spec!r}: returned a {type(model).__name__}, expected a torch.nn.Module")
    return model


def resolve_inputs(spec: str) -> list[Any]:
    """Example batches: of a file that ``torch.save`` wrote, or returned by ``pkg.module:function``.

    Args:
        spec: a file holds tensors and plain containers only (``weights_only``); a function may return any class.

    Returns:
        one or two batches: a list is one of batches, anything else is one batch.

    Raises:
        ConfigError: neither a file nor of the form ``pkg.module:function``.
        InputError: a file that holds something else.
        NotFoundError, UnavailableError: as :func:`resolve_model`.
    """
    path = Path(spec)
    if path.is_file() or ":" not in spec:
        if not path.is_file():
            raise ConfigError(f"--inputs {spec!r}: no such file; expected a file of torch.save, or pkg.module:function")
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises exceptions of many types
            text = str(error)
            other = re.search(r"Unsupported (?:global|class): (?:GLOBAL )?([\w.]+)", text)
            what = (
                f"holds a {other[1]}"
                if other
                else f"cannot be read: {type(error).__name__}: {text.splitlines()[0][:200]}"
            )
            raise InputError(
                f"--inputs {spec!r} {what}; save tensors in plain tuples, lists and dicts by torch.save, or name a function, "
                f"pkg.module:function, for other classes"
            ) from None
    else:
        found = _call("--inputs", spec)
    return list(found) if isinstance(found, list) else [found]


def _call(option: str, spec: str) -> Any:
    """Import the module of ``spec`` and call its function; errors name ``option``."""
    name, colon, function = spec.partition(":")
    if not (colon and name and function.isidentifier()):
        raise ConfigError(f"{option} {spec!r}: expected pkg.module:function, as in my_models.ranker:build")
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(name)
        build = getattr(module, function, None)
        if not callable(build):
            known = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
            raise NotFoundError(
                f"{option} {spec!r}: {name} has no function {function!r}; it has {', '.join(known[:10])}"
            )
        return build()
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        if (name + ".").startswith(missing + "."):
            raise NotFoundError(
                f"{option} {spec!r}: no module {missing!r}; looked in {here} and in sys.path"
            ) from error
        raise UnavailableError(_not_installed(option, spec, missing)) from error
    finally:
        if added:
            sys.path.remove(here)


def _not_installed(option: str, spec: str, missing: str) -> str:
    """The message for a package that the user's module imports and that is not installed."""
    text = f"{option} {spec!r}: it imports {missing!r}, which is not installed where recinfer runs; "
    if missing.partition(".")[0] == "torchrec":
        return text + ("install torchrec to use the model unchanged, or rewrite its imports with `recinfer migrate`")
    return text + "install it, or build the model without it"
