"""Errors become codes, and the client turns a code into the error of the same meaning."""

from __future__ import annotations

import asyncio
import json
from concurrent import futures
from typing import Any

import grpc
import pytest

from recinfer import errors
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.client.client import AsyncInferenceClient, InferenceClient
from recinfer.serving.client.torchserve import error_in
from recinfer.serving.server.grpc_call import ending_of
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.status import error_of, status_of


@pytest.mark.parametrize(
    ("error", "code", "http"),
    [
        (errors.InputError("dense: got 1"), "INVALID_ARGUMENT", 400),
        (errors.NotFoundError("model: got x"), "NOT_FOUND", 404),
        (errors.NotPreparedError("version: got 3"), "FAILED_PRECONDITION", 412),
        (errors.OverloadedError("full"), "RESOURCE_EXHAUSTED", 429),
        (errors.DeadlineError("too late"), "DEADLINE_EXCEEDED", 504),
        (errors.UnavailableError("later"), "UNAVAILABLE", 503),
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


class _Raises(grpc.GenericRpcHandler):
    """Ends every call as a server of ours ends one that failed with ``error``."""

    error: Exception = errors.RecinferError("")

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler:
        def end(_: bytes, context: grpc.ServicerContext) -> bytes:
            ending = ending_of(self.error)
            context.set_trailing_metadata(ending.trailing)
            context.abort(grpc.StatusCode[ending.code], ending.message)
            return b""

        return grpc.unary_unary_rpc_method_handler(end)


def test_each_error_arrives_as_its_class_at_every_client():
    handler = _Raises()
    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[handler])
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()

    async def call_async() -> None:
        async with AsyncInferenceClient(target, retries=0, timeout=60) as client:
            await client.get_model()

    def call_blocking() -> None:
        with InferenceClient(target, retries=0, timeout=60) as client:
            client.get_model()

    def call_admin() -> None:
        with AdminClient(target) as client:
            client.list_models()

    try:
        for kind in (k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.RecinferError)):
            handler.error = kind("x")
            status = status_of(handler.error)
            expected = errors.RecinferError if status.code == "INTERNAL" else kind
            for call in (call_blocking, call_admin, lambda: asyncio.run(call_async())):
                with pytest.raises(errors.RecinferError) as caught:
                    call()
                assert caught.type is expected, (kind, call)
            batched = json.dumps({"error": {"code": status.code, "message": status.message}})
            assert type(error_in(batched.encode())) is expected
    finally:
        server.stop(None)
