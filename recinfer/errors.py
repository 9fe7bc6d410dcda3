"""The exceptions that recinfer raises.

    RecinferError
    ├── InputError (ValueError)        a request or call with wrong data: shape, id, dtype, missing feature
    ├── NotFoundError (LookupError)    a model, table or version that does not exist
    │   └── NotPreparedError           a version that this shard server has not mapped yet
    ├── ConfigError (ValueError)       an inconsistent config, plan or feature contract
    ├── CheckpointError (ValueError)   a checkpoint that cannot be read, or does not match the model
    ├── ArchiveError (ValueError)      an archive that breaks a rule of archive/FORMAT.md (``.rule`` names it)
    ├── MismatchError (ValueError)     outputs that differ from the recorded ones (``.comparison`` has the rows)
    └── UnavailableError (RuntimeError) something that would work elsewhere or later: a missing extra, a stopped server
        ├── OverloadedError            the server's queue or memory budget is full (``.retry_after`` seconds)
        └── DeadlineError              a request's deadline passed before it was run

A message says what came, what was expected and what to do next. Internal errors (bugs) are ``assert``s, never one of
these. :mod:`recinfer.serving.wire.codec` maps the exceptions to gRPC and HTTP codes.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ArchiveError",
    "CheckpointError",
    "ConfigError",
    "DeadlineError",
    "InputError",
    "MismatchError",
    "NotFoundError",
    "NotPreparedError",
    "OverloadedError",
    "RecinferError",
    "UnavailableError",
]


class RecinferError(Exception):
    """Base class of all errors that recinfer raises on purpose."""


class InputError(RecinferError, ValueError):
    """The data of one call is wrong; the message names the field, what came and what was expected."""


class NotFoundError(RecinferError, LookupError):
    """A named thing (model, version, table, feature) does not exist; the message lists what does."""


class NotPreparedError(NotFoundError):
    """A lookup named a version that the shard server has not mapped; a Prepare call maps it."""


class ConfigError(RecinferError, ValueError):
    """A config, plan or feature contract is inconsistent; raised when it is built, not when it is used."""


class CheckpointError(RecinferError, ValueError):
    """A checkpoint cannot be read or does not fit the model; the message names the key."""


class ArchiveError(RecinferError, ValueError):
    """An archive breaks a rule of ``archive/FORMAT.md``.

    Attributes:
        rule: the id of the rule that is broken, for example ``"M3"``; ``""`` when no single rule applies.
    """

    def __init__(self, message: str, *, rule: str = "") -> None:
        super().__init__(f"[{rule}] {message}" if rule else message)
        self.rule = rule


class MismatchError(RecinferError, ValueError):
    """A model's outputs differ from those recorded for the same inputs.

    Attributes:
        comparison: a :class:`recinfer.inference.comparison.Comparison` with the rows and differences; None if unknown.
    """

    def __init__(self, message: str, comparison: Any = None) -> None:
        super().__init__(message)
        self.comparison = comparison


class UnavailableError(RecinferError, RuntimeError):
    """A requirement is missing now (an optional extra, a running server); the message says how to provide it."""


class OverloadedError(UnavailableError):
    """A server's queue or memory budget is full.

    Attributes:
        retry_after: seconds to wait before a retry.
    """

    def __init__(self, message: str, *, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineError(UnavailableError):
    """A request's deadline passed before its run."""
