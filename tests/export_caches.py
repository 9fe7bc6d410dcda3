"""Caches of what torch computes again in each export of a small model: half of its time."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

__all__ = ["cache_exports", "keep_programs", "programs_of_run"]

_folder: Path | None = None


def keep_programs(folder: Path | None) -> None:
    """Look for the programs of a dense part in ``folder`` before they are exported; None: export all. The modules that export may be
    imported later: :func:`cache_exports` begins with it."""
    global _folder
    _folder = folder


def programs_of_run() -> Path | None:
    """The folder of :func:`keep_programs`, for processes that this one starts."""
    return _folder


def cache_exports() -> None:
    """Cache it in the modules that are imported by now; may be called again when more are."""
    exports: Any = sys.modules.get("torch._export.utils")
    if exports is not None and not hasattr(exports._materialize_cpp_cia_ops, "of_new"):
        _make_new_operators_known(exports)
    prepare: Any = sys.modules.get("recinfer.inference.prepare")
    if _folder is not None and prepare is not None and not hasattr(prepare.export_part, "__wrapped__"):
        from tests.programs import kept_in

        prepare.export_part = kept_in(_folder, prepare.export_part)
    if "onnxscript._framework_apis.torch_2_5" in sys.modules:  # whose function the later ones have
        _cache_functions_of_onnxscript()


def _make_new_operators_known(exports: Any) -> None:
    """torch.export has all operators of C++ made known to Python, 56 times in an export, though there are new ones only when a
    library is loaded."""
    make_known, known = exports._materialize_cpp_cia_ops, set[int]()

    def make_new_known() -> None:
        of_cpp = sys.modules["torch"]._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if len(of_cpp) not in known:
            make_known()
            known.add(len(of_cpp))

    make_new_known.of_new = True  # type: ignore[attr-defined]
    exports._materialize_cpp_cia_ops = make_new_known


def _cache_functions_of_onnxscript() -> None:
    """torch.onnx.export asks onnxscript for the same 500 functions, and derives the signature of each."""
    schemas = sys.modules.get("torch.onnx._internal.exporter._schemas")
    if schemas is None or hasattr(schemas.op_signature_from_function, "cache_info"):
        return
    schemas.op_signature_from_function = functools.cache(schemas.op_signature_from_function)  # type: ignore[attr-defined]
    for name, module in tuple(sys.modules.items()):
        found = getattr(module, "get_torchlib_ops", None) if name.startswith("onnxscript._framework_apis.") else None
        if found is not None:
            module.get_torchlib_ops = functools.cache(found)  # type: ignore[attr-defined]
