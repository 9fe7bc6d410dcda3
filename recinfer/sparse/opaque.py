"""Marks modules that torch.fx and TorchScript treat as leaves."""

from __future__ import annotations

from typing import NoReturn

from recinfer.errors import UnavailableError

__all__ = ["Opaque"]


class Opaque:
    """Base class of modules that read jagged data: their Python code depends on the data (keys, variable batches,
    checks of ids).

    :class:`recinfer.fx.Tracer` keeps a call of such a module as one node; a tracer of torch.fx does so if the module is
    among its leaves. ``torch.jit.script`` of it, or of a model that holds it, is refused.
    """

    def __prepare_scriptable__(self) -> NoReturn:
        # torch.jit.script calls this on every module of a model before it compiles any.
        raise UnavailableError(
            f"torch.jit.script cannot compile {type(self).__name__}: recinfer's modules that read jagged features do "
            f"not support TorchScript, which PyTorch has deprecated. To serve the model, write an archive (recinfer "
            f"export, or "
            "recinfer.inference.export.export_archive); to compile it, use torch.export; to script the dense part alone, "
            "script the modules without tables"
        )
