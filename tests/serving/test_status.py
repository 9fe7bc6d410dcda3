"""Errors become codes, and the client turns a code into the error of the same meaning."""

from __future__ import annotations

import grpc
import pytest

from recinfer import errors
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.status import error_of, status_of


@pytest.mark.parametrize(
    ("error", "code", "http"),
    [
        (errors.InputError("dense: got 1"), "INVALID_ARGUMENT", 400),
        (errors.NotFoundError("model: got x"), "NOT_FOUND", 404),
        (errors.NotPreparedError("version: x"), "FAILED_PRECONDITION", 412),
        (errors.UnavailableError("later"), "UNAVAILABLE", 503),
        (errors.DeadlineError("too late"), "DEADLINE_EXCEEDED", 504),
        (errors.OverloadedError("full", retry_after=0.2), "RESOURCE_EXHAUSTED", 429),
        (errors.ConfigError("/srv/secret"), "INTERNAL", 500),
        (errors.ArchiveError("/srv/secret", rule="F1"), "INTERNAL", 500),
        (errors.CheckpointError("/srv/secret"), "INTERNAL", 500),
        (KeyError("/srv/secret"), "INTERNAL", 500),
        (MemoryError(), "INTERNAL", 500),
    ],
)
def test_table(error: Exception, code: str, http: int):
    status = status_of(error)
    assert (status.code, status.http) == (code, http)
    assert status.code in grpc.StatusCode.__members__
    assert "secret" not in status.message
    if code != "INTERNAL":
        assert status.message == str(error)
        assert type(error_of(status.code, status.message)) is type(error)


def test_every_error_of_the_tree_has_a_code():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) == len(errors.__all__)
    assert all(status_of(kind("x")).code in grpc.StatusCode.__members__ for kind in kinds)


def test_an_unknown_code_is_still_an_error_of_ours():
    assert type(error_of("DATA_LOSS", "x")) is errors.RecinferError


@pytest.mark.parametrize("value", [0, -1, True, 1.5, 2**31])
def test_limits_are_checked_when_built(value: object):
    with pytest.raises(errors.ConfigError, match="max_batch"):
        Limits(max_batch=value)  # type: ignore[arg-type]


def test_a_long_message_fits_a_header():
    status = status_of(errors.InputError("unknown feature " + "x" * 100_000))
    assert status.message.startswith("unknown feature xxx")
    assert len(status.message) < 1100
