"""Imports the function of ``--model pkg.module:function`` and calls it."""

from __future__ import annotations

import importlib
import os
import sys

from torch import nn

from recinfer.errors import ConfigError, NotFoundError, UnavailableError

__all__ = ["resolve_model"]


def resolve_model(spec: str) -> nn.Module:
    """Import ``pkg.module`` (the working directory counts) and call its ``function`` with no arguments.

    The function returns the module; build embedding tables with ``device="meta"``, so that they cost no memory. The
    call runs the user's code.

    Raises:
        ConfigError: not of the form ``pkg.module:function``, or the function does not return a module.
        NotFoundError: no such module or function.
        UnavailableError: the user's module imports a package that is not installed.
    """
    name, colon, function = spec.partition(":")
    if not (colon and name and function.isidentifier()):
        raise ConfigError(f"--model {spec!r}: expected pkg.module:function, as in my_models.ranker:build")
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
                f"--model {spec!r}: {name} has no function {function!r}; it has {', '.join(known[:10])}"
            )
        model = build()
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        if (name + ".").startswith(missing + "."):
            raise NotFoundError(f"--model {spec!r}: no module {missing!r}; looked in {here} and in sys.path") from error
        raise UnavailableError(_not_installed(spec, missing)) from error
    finally:
        if added:
            sys.path.remove(here)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model {spec!r}: returned a {type(model).__name__}, expected a torch.nn.Module")
    return model


def _not_installed(spec: str, missing: str) -> str:
    """The message for a package that the user's module imports and that is not installed."""
    text = f"--model {spec!r}: it imports {missing!r}, which is not installed where recinfer runs; "
    if missing.partition(".")[0] == "torchrec":
        return text + ("install torchrec to use the model unchanged, or rewrite its imports with `recinfer migrate`")
    return text + "install it, or build the model without it"
