"""Records each request: counts, a JSON line in the log, and a span if OpenTelemetry is installed.

A request's id is its ``x-request-id`` metadata (or HTTP header), else a new one.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
import time
import uuid
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from recinfer.serving.engine.stats import RequestStats

if TYPE_CHECKING:
    from recinfer.serving.engine.registry import ServedModel

__all__ = ["JsonLines", "Observer", "log_as_json"]

_log = logging.getLogger("recinfer.requests")
_MAX_ID = 128
_OF_A_CHANGE = ("change", "model", "version", "who", "reason")
_EXTRA = ("request_id", "call", "code", "ms", "bytes", "protocol", *_OF_A_CHANGE)


class Observer:
    """Records every answered request, once, on the thread that ends the request.

    Args:
        stats: counts the requests.
        trace: start OpenTelemetry spans; None: if the package ``opentelemetry`` is installed and a tracer provider was set
            (by the program, or by ``opentelemetry-instrument``): without a provider every span would be discarded.
    """

    def __init__(self, stats: RequestStats, *, trace: bool | None = None) -> None:
        self.stats = stats
        self._tracing = _Tracing() if (_has_provider() if trace is None else trace) else None

    def answered(
        self,
        call: str,
        code: str,
        seconds: float,
        *,
        headers: Any = None,
        num_bytes: int = 0,
        protocol: str = "grpc",
        served: ServedModel | None = None,
    ) -> None:
        """Count, log and trace one request.

        Args:
            call: the method's name.
            code: name of its gRPC status code.
            seconds: seconds from its arrival to its answer.
            headers: its metadata, a mapping or pairs, or a function that returns them; read only if needed.
            num_bytes: size of the request.
            protocol: ``"grpc"`` or ``"http"``.
            served: the version that the request got; None: the request names nothing served.
        """
        self.stats.add(call, code, seconds, None if served is None else served.answers)
        self._log_and_trace(call, code, seconds, headers, num_bytes, protocol, served)

    def refused(self, call: str, code: str, headers: Any = None) -> None:
        """Count, log and trace a request that was refused on arrival, with a duration of 0."""
        self.stats.add(call, code, None)
        self._log_and_trace(call, code, 0.0, headers, 0, "grpc")

    def _log_and_trace(
        self,
        call: str,
        code: str,
        seconds: float,
        headers: Any,
        num_bytes: int,
        protocol: str,
        served: ServedModel | None = None,
    ) -> None:
        logged = _log.isEnabledFor(logging.INFO)
        if not logged and self._tracing is None:
            return
        found = _lowered(headers() if callable(headers) else headers)
        request_id = found.get("x-request-id", "")[:_MAX_ID] or uuid.uuid4().hex
        if logged:
            extra = {"request_id": request_id, "call": call, "code": code, "ms": round(seconds * 1e3, 3)}
            extra |= (
                {"model": "", "version": ""} if served is None else {"model": served.name, "version": served.version}
            )
            _log.info("%s %s", call, code, extra={**extra, "bytes": num_bytes, "protocol": protocol})
        if self._tracing is not None:
            self._tracing.span(call, code, seconds, found, request_id)


def _lowered(headers: Mapping[str, str] | Iterable[tuple[str, Any]] | None) -> dict[str, str]:
    if headers is None:
        return {}
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return {key.lower(): value for key, value in pairs if isinstance(value, str)}


def _has_provider() -> bool:
    if importlib.util.find_spec("opentelemetry") is None:
        return False
    from opentelemetry import trace

    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


class _Tracing:
    """Spans of requests, written when they are answered; the caller's ``traceparent`` is their parent."""

    def __init__(self) -> None:
        from opentelemetry import propagate, trace

        self._extract = propagate.extract
        self._trace = trace
        self._tracer = trace.get_tracer("recinfer")

    def span(self, call: str, code: str, seconds: float, headers: dict[str, str], request_id: str) -> None:
        end = time.time_ns()
        span = self._tracer.start_span(
            f"recinfer/{call}",
            context=self._extract(headers),
            kind=self._trace.SpanKind.SERVER,
            start_time=end - int(seconds * 1e9),
            attributes={"rpc.method": call, "rpc.grpc.status": code, "recinfer.request_id": request_id},
        )
        if code not in ("OK", "CANCELLED"):
            span.set_status(self._trace.StatusCode.ERROR, code)
        span.end(end_time=end)


class JsonLines(logging.Formatter):
    """Formats a log record as one JSON object: time, level, logger, message, the fields of a request's line, the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The line without a line end."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": at, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        line |= {key: getattr(record, key) for key in _EXTRA if hasattr(record, key)}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_as_json(*, requests: bool = True) -> None:
    """Write the package's log to stderr as JSON lines, with one line per request unless ``requests`` is False."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    package = logging.getLogger("recinfer")
    package.handlers[:] = [handler]
    package.propagate = False
    package.setLevel(logging.INFO)
    _log.setLevel(logging.INFO if requests else logging.WARNING)
