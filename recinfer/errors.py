"""The one tree of errors a user of recinfer can meet.

    RecinferError
    ├── InputError (ValueError)        a request or call with wrong data: shape, id, dtype, missing feature
    ├── NotFoundError (LookupError)    a model, table or version that is not there
    │   └── NotPreparedError           a version that this shard server has not mapped, and can be told to
    ├── ConfigError (ValueError)       a config, plan or contract that does not hold together
    ├── CheckpointError (ValueError)   a checkpoint that cannot be read, or does not match the model
    ├── ArchiveError (ValueError)      an archive that breaks a rule of archive/FORMAT.md (``.rule`` names it)
    ├── MismatchError (ValueError)     a model whose outputs are not the recorded ones (``.comparison`` has the rows)
    └── UnavailableError (RuntimeError) something that would work elsewhere or later: a missing extra, a stopped server
        ├── OverloadedError            the server has as many requests waiting as it may (``.retry_after`` seconds)
        └── DeadlineError              a request's deadline passed before it was run

Messages say what came, what was expected and what to do next. Bugs of our own are ``assert``s, never one of these.
One table in :mod:`recinfer.serving.wire.codec` maps them to gRPC and HTTP codes.
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
    """Base of every error recinfer raises on purpose."""


class InputError(RecinferError, ValueError):
    """The data of one call is wrong; the message names the field, what came and what was expected."""


class NotFoundError(RecinferError, LookupError):
    """A named thing (model, version, table, feature) does not exist; the message lists what does."""


class NotPreparedError(NotFoundError):
    """A shard server was asked for a version that it has not mapped; it can be told to prepare it."""


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
    """A model whose outputs are not those that were recorded for the same inputs.

    Attributes:
        comparison: a :class:`recinfer.inference.comparison.Comparison`: which rows, and how far off; None: not known.
    """

    def __init__(self, message: str, comparison: Any = None) -> None:
        super().__init__(message)
        self.comparison = comparison


class UnavailableError(RecinferError, RuntimeError):
    """Something needed is not here now (an optional extra, a running server); the message says how to get it."""


class OverloadedError(UnavailableError):
    """A server has as many requests waiting as it may.

    Attributes:
        retry_after: seconds after which another try makes sense.
    """

    def __init__(self, message: str, *, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineError(UnavailableError):
    """The deadline of a request passed before it was run."""
