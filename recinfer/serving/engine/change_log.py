"""Lines of the log about changes of models: the change, its author and its reason."""

from __future__ import annotations

import logging
import sys
from typing import Any

from google.protobuf.message import DecodeError

from recinfer.serving.wire.admin_verbs import VERBS

__all__ = ["BY_POLLING", "log_change", "log_refused", "show_changes"]

LOGGER = "recinfer.changes"
BY_POLLING = "model store"
"""The author of the changes that a server makes when it follows its model store."""
_MAX_TEXT = 200
_log = logging.getLogger(LOGGER)


def show_changes() -> None:
    """Write these lines, and the package's warnings and errors, to stderr as text with their times.

    For a process whose log is not JSON. Without this, FBGEMM's import decides: its root handler writes no times.
    """
    _show(_log, "%(asctime)s %(message)s").setLevel(logging.INFO)
    _show(logging.getLogger("recinfer"), "%(asctime)s %(levelname)s %(message)s")


def _show(log: logging.Logger, line: str) -> logging.Logger:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(line))
    log.handlers[:] = [handler]
    log.propagate = False
    return log


def log_change(call: str, data: bytes) -> None:
    """Log a change that was made; ``call``: the admin call's name, ``data``: its serialized request."""
    fields = _fields_of(call, data)
    if fields is not None:
        _log.info("%s", _line(fields), extra=fields)


def log_refused(call: str, data: bytes, error: Exception) -> None:
    """Log a change that was requested and not made, except changes by polling, which logs each of its failures once."""
    fields = _fields_of(call, data)
    if fields is not None and fields["who"] != BY_POLLING:
        _log.warning("%s, refused: %s", _line(fields), error, extra=fields)


def _fields_of(call: str, data: bytes) -> dict[str, Any] | None:
    """The fields of a log line by name; None for a call that changes nothing."""
    verb = VERBS.get(call)
    if verb is None or not verb.changes:
        return None
    try:
        request: Any = verb.request.FromString(data)
    except DecodeError:
        return None
    who, reason = (_one_line(text) for text in (request.change.who, request.change.reason))
    fields = {"change": call, "model": _one_line(request.model), "version": _one_line(verb.subject(request))}
    return fields | {"who": who or "unknown", "reason": reason or "none given"}


def _line(fields: dict[str, Any]) -> str:
    what = " ".join(filter(None, (fields["model"], fields["version"])))
    return f"{fields['change']} {what}, by {fields['who']}, reason: {fields['reason']}"


def _one_line(text: str) -> str:
    """``text`` as one short line, since line ends in a client's text could look like lines of the log."""
    line = "".join(char if char.isprintable() else " " for char in text)
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 3] + "..."
