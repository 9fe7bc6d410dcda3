"""A faster Triton interpreter: a third of its time goes to patches that are in place."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["patch_once"]


def patch_once() -> None:
    """Let calls of a kernel's functions patch Triton's language once; without effect until the interpreter is imported.

    A launch patches the language that its kernel names, and takes the patches back at its end. A call of another function
    patches the language that this function names again, 700 attributes after a search for them: attributes that the launch
    has patched, or those of ``triton.language.core``, whose patches stay.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter.InterpretedFunction.__call__, "patched"):
        return
    patching, raised = interpreter.InterpretedFunction.__call__, interpreter.InterpreterError
    patched = set[Any]()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in patched:
            patched.add(self.fn)
            return patching(self, *args, **kwargs)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise raised(repr(error)) from error

    call.patched = patched  # type: ignore[attr-defined]
    interpreter.InterpretedFunction.__call__ = call
