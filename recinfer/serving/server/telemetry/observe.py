"""Records each request: counts, a JSON line in the log, and a span if OpenTelemetry is installed.

A request's id is its ``x-request-id`` metadata (or HTTP header), else a new one; answers and errors return it.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from recinfer.serving.engine.registry import RequestStats
from recinfer.serving.wire.tracing import SpanFields, Tracer, has_provider, is_request_id

if TYPE_CHECKING:
    from recinfer.serving.engine.registry import ServedModel

__all__ = ["REQUEST_ID", "CallTrace", "JsonLines", "Observer", "RequestIds", "log_as_json", "lowered"]

_log = logging.getLogger("recinfer.requests")
_MAX_ID = 128
_SENT_ON = ("x-request-id", "traceparent", "tracestate")
_OF_A_CHANGE = ("change", "model", "version", "who", "reason")
_EXTRA = ("request_id", "call", "code", "ms", "bytes", "protocol", *_OF_A_CHANGE)
REQUEST_ID = "x-request-id"
"""The header of HTTP, and key of gRPC's metadata, that holds a request's id."""
_PREFIX, _DIGITS = 20, 12  # hexadecimal digits: random ones of a server, and a number


class RequestIds:
    """Ids of one server's requests. Any thread may call it."""

    def __init__(self) -> None:
        # A random number per request would take a noticeable part of a small request's time.
        self._prefix = uuid.uuid4().hex[:_PREFIX]
        self._numbers = itertools.count()

    def of(self, given: Any) -> str:
        """``given`` if it is an id of 1 to 128 characters that a header can hold, else a new id of 32 characters."""
        if given is not None and is_request_id(given):
            return str(given)
        return f"{self._prefix}{next(self._numbers):0{_DIGITS}x}"

    def in_metadata(self, metadata: Sequence[tuple[str, Any]]) -> tuple[str, Sequence[tuple[str, Any]]]:
        """The id of a call, and its metadata with that id."""
        given = None
        for key, value in metadata:
            if key == REQUEST_ID:
                given = value
                break
        found = self.of(given)
        return found, metadata if found is given else (*metadata, (REQUEST_ID, found))


class Observer:
    """Records every answered request, once, on the thread that ends the request.

    Args:
        stats: counts the requests.
        trace: start OpenTelemetry spans; None: if the package ``opentelemetry`` is installed and a tracer provider was set
            (by the program, or by ``opentelemetry-instrument``): without a provider every span would be discarded.
        sends_on: the server's calls lead to calls of other servers: a ranker's.
    """

    def __init__(self, stats: RequestStats, *, trace: bool | None = None, sends_on: bool = False) -> None:
        self.stats = stats
        self._tracer = Tracer() if (has_provider() if trace is None else trace) else None
        self._sends_on = sends_on

    def begin(self, call: str, headers: Any) -> CallTrace | None:
        """The trace of a call that begins now; None where neither spans are written nor calls are sent on.

        Args:
            headers: see :meth:`answered`.
        """
        # Sending the id on costs a small request of a ranker some percent: only a log of requests or a trace needs it.
        if self._tracer is None and not (
            self._sends_on and (_log.isEnabledFor(logging.INFO) or "traceparent" in lowered(headers))
        ):
            return None
        return CallTrace(call, headers, self._tracer)

    def answered(
        self,
        call: str,
        code: str,
        seconds: float | None,
        *,
        headers: Any = None,
        num_bytes: int = 0,
        protocol: str = "grpc",
        served: ServedModel | None = None,
        trace: CallTrace | None = None,
    ) -> None:
        """Count, log and trace one request.

        Args:
            call: the method's name.
            code: name of its gRPC status code.
            seconds: seconds from its arrival to its answer; None: it was refused on arrival.
            headers: its metadata, a mapping or pairs, or a function that returns them; read only if needed.
            num_bytes: size of the request.
            protocol: ``"grpc"`` or ``"http"``.
            served: the version that the request got; None: the request names nothing served.
            trace: the result of :meth:`begin`; None: the span is written as a whole now.
        """
        self.stats.add(call, code, seconds, None if served is None else served.answers)
        seconds = seconds or 0.0
        logged = _log.isEnabledFor(logging.INFO)
        if not logged and self._tracer is None:
            return
        found = lowered(headers)
        request_id = found.get("x-request-id", "")[:_MAX_ID] or uuid.uuid4().hex
        if logged:
            extra = {"request_id": request_id, "call": call, "code": code, "ms": round(seconds * 1e3, 3)}
            extra |= (
                {"model": "", "version": ""} if served is None else {"model": served.name, "version": served.version}
            )
            _log.info("%s %s", call, code, extra={**extra, "bytes": num_bytes, "protocol": protocol})
        if self._tracer is not None:
            end = time.time_ns()
            span = None if trace is None else trace.span
            if span is None:
                span = self._tracer.start(call, found, end - int(seconds * 1e9))
            of_version = {} if served is None else {"recinfer.model": served.name, "recinfer.version": served.version}
            self._tracer.end(span, code, {"recinfer.request_id": request_id, **of_version}, end)


def lowered(headers: Any) -> dict[str, str]:
    """Headers or metadata by lower-case name: a mapping, pairs, a function that returns them, or None."""
    headers = headers() if callable(headers) else headers
    if headers is None:
        return {}
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return {key.lower(): value for key, value in pairs if isinstance(value, str)}


class CallTrace:
    """The trace of a call under way. Any thread may call it.

    Args:
        call: the method's name.
        headers: the call's metadata, a mapping or pairs, or a function that returns them.
        tracer: starts the call's span; None: no spans are written, and the caller's trace goes on.

    Attributes:
        span: the call's span; None without spans.
    """

    __slots__ = ("_headers", "_tracer", "span")

    def __init__(self, call: str, headers: Any, tracer: Tracer | None) -> None:
        self._headers = headers
        self._tracer = tracer
        self.span = None if tracer is None else tracer.start(call, lowered(headers), time.time_ns())

    def __call__(self) -> SpanFields:
        """The headers for calls that are part of this one."""
        given = lowered(self._headers)
        found = {key: given[key] for key in _SENT_ON if key in given}
        return found if self._tracer is None else {**found, **self._tracer.fields(self.span)}


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


def log_as_json() -> None:
    """Write the package's log to stderr as JSON lines, with one line per request."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    package = logging.getLogger("recinfer")
    package.handlers[:] = [handler]
    package.propagate = False
    package.setLevel(logging.INFO)
    _log.setLevel(logging.INFO)
