"""OpenTelemetry's trace of a call, from client to ranker to shard servers; without a tracer provider nothing is traced.

Contexts travel in the W3C headers ``traceparent`` and ``tracestate``.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from recinfer.errors import InputError
from recinfer.serving.wire.tls import fits_a_header

__all__ = [
    "Fields",
    "Metadata",
    "SpanFields",
    "Tracer",
    "client_span",
    "has_provider",
    "is_request_id",
    "no_trace",
    "request_id",
]

SpanFields = Mapping[str, str]
"""``traceparent``, ``tracestate`` and ``x-request-id`` of a call, as far as they are known."""

Metadata = tuple[tuple[str, str], ...]
_MAX_ID = 128


def no_trace() -> SpanFields:
    """No fields: the caller of a server without shards."""
    return {}


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("opentelemetry") is not None


def has_provider() -> bool:
    """Whether OpenTelemetry is installed and a tracer provider was set, by the program or by ``opentelemetry-instrument``:
    without a provider every span would be discarded."""
    if not _is_installed():
        return False
    from opentelemetry import trace

    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def is_request_id(given: Any) -> bool:
    """Whether ``given`` is text of 1 to 128 characters that a header can hold."""
    return isinstance(given, str) and 0 < len(given) <= _MAX_ID and fits_a_header(given)


_request_id: ContextVar[str] = ContextVar("request_id", default="")


@contextmanager
def request_id(given: str) -> Iterator[None]:
    """Let the calls of recinfer's clients in the block carry an id, ``x-request-id``, which servers log and return.

    The block holds for its thread or asyncio task.

    Raises:
        InputError: not 1 to 128 characters that a header can hold.

    >>> with request_id("checkout-17"):                                         # doctest: +SKIP
    ...     client.predict(dense, features)
    """
    if not is_request_id(given):
        raise InputError(f"request_id: got {given!r:.160}, expected 1 to {_MAX_ID} characters that a header can hold")
    token = _request_id.set(given)
    try:
        yield
    finally:
        _request_id.reset(token)


@contextmanager
def client_span(call: str, metadata: Metadata) -> Iterator[Metadata]:
    """The span of a client's call, with all its tries; yields ``metadata`` with the span's context, which a server's span
    becomes a child of, and with the id of :func:`request_id`."""
    if found := _request_id.get():
        metadata = (*metadata, ("x-request-id", found))
    if not has_provider():
        yield metadata
        return
    from opentelemetry import propagate, trace

    attributes = {"rpc.system": "grpc", "rpc.method": call, **({"recinfer.request_id": found} if found else {})}
    tracer, kind = trace.get_tracer("recinfer"), trace.SpanKind.CLIENT
    with tracer.start_as_current_span(f"recinfer.client/{call}", kind=kind, attributes=attributes):
        fields: dict[str, str] = {}
        propagate.inject(fields)
        yield (*metadata, *fields.items())


class Tracer:
    """Spans of a server's calls. Any thread may call it."""

    def __init__(self) -> None:
        from opentelemetry import propagate, trace

        self._propagate, self._trace = propagate, trace
        self._tracer = trace.get_tracer("recinfer")

    def start(self, call: str, headers: Mapping[str, str], start_ns: int) -> Any:
        """A span that began at ``start_ns``; the caller's, in ``headers``, is its parent."""
        return self._tracer.start_span(
            f"recinfer/{call}",
            context=self._propagate.extract(headers),
            kind=self._trace.SpanKind.SERVER,
            start_time=start_ns,
            attributes={"rpc.method": call},
        )

    def end(self, span: Any, code: str, attributes: Mapping[str, str], end_ns: int) -> None:
        """End a span with a gRPC status code."""
        span.set_attributes({"rpc.grpc.status": code, **attributes})
        if code not in ("OK", "CANCELLED"):
            span.set_status(self._trace.StatusCode.ERROR, code)
        span.end(end_time=end_ns)

    def fields(self, span: Any) -> dict[str, str]:
        """The headers with the context of a span, for calls that are part of it."""
        found: dict[str, str] = {}
        self._propagate.inject(found, self._trace.set_span_in_context(span))
        return found


Fields = Callable[[], SpanFields]
"""Returns the fields of a call when they are sent on."""
