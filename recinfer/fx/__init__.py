"""Symbolic tracing (torch.fx) of models with recinfer's modules."""

from __future__ import annotations

from recinfer.fx.tracer import Tracer, symbolic_trace

__all__ = ["Tracer", "symbolic_trace"]
