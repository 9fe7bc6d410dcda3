"""Clients of the gRPC server, blocking and asyncio: ids in, embeddings and outputs out; they need no torch."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from typing import Any

import grpc
import grpc.aio

from recinfer.arrow import as_raw
from recinfer.columns import DENSE
from recinfer.errors import InputError, RecinferError, UnavailableError
from recinfer.inference.specs import Outputs
from recinfer.serving.client.answers import (
    Embeddings,
    ModelDescription,
    decode_description,
    decode_embeddings,
    decode_outputs,
    torch_is_installed,
)
from recinfer.serving.client.bulk import ScoredRow, score, score_async
from recinfer.serving.client.calls import channel_to, check_target, translated
from recinfer.serving.client.credentials import ClientCredentials
from recinfer.serving.client.retry import Retries, Throttle, check_timeout
from recinfer.serving.wire.arrays import bytes_field, encode_lookup_request, encode_predict_request
from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.serving.wire.tracing import Metadata, client_span

__all__ = [
    "AsyncInferenceClient",
    "Embeddings",
    "InferenceClient",
    "ModelDescription",
    "ScoredRow",
]

_SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
# gRPC's health service in the two messages that a client needs: HealthCheckRequest{service = 1} and
# HealthCheckResponse{status = 1}; the package that holds them is for servers.
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_CALLS, _CHECK = ("Lookup", "Predict", "GetModel"), "Check"
_HEALTH_REQUEST, IS_SERVING = b"".join(bytes_field(1, _SERVICE.encode())), b"\x08\x01"
_POLL_S = 0.05
_START_WITH = "recinfer serve ARCHIVE --port N"


class _Client:
    """The part that both clients share: settings (see InferenceClient), and the conversion of inputs and answers."""

    def __init__(
        self,
        target: str,
        *,
        model: str = "",
        version: str = "",
        timeout: float = 10.0,
        retries: int = 2,
        throttle: bool = True,
        token: str = "",
        tls_ca: str | os.PathLike[str] | None = None,
        tls_cert: str | os.PathLike[str] | None = None,
        tls_key: str | os.PathLike[str] | None = None,
        tls_name: str = "",
        tensors: bool | None = None,
        label: str = "",
        token_file: str | os.PathLike[str] | None = None,
    ) -> None:
        if retries < 0:
            raise InputError(f"retries: got {retries}, expected 0 or more")
        for what, name in (("model", model), ("version", version), ("label", label)):
            if not isinstance(name, str) or any("\ud800" <= c <= "\udfff" for c in name):
                raise InputError(f"{what}: got {name!r:.80}, expected text")
        check_target(target)
        check_timeout(timeout)
        if version and label:
            raise InputError(f"version: got {version!r:.80} and the label {label!r:.80}, expected one of them")
        self.target = target
        self.model = model
        self.version = version
        self.label = label
        self.timeout = timeout
        self.retries = retries
        # One throttle per call, as a server may refuse predictions while it accepts lookups.
        self._throttles = {call: Throttle() for call in ("Lookup", "Predict")} if throttle else {}
        if tensors and not torch_is_installed():
            raise UnavailableError("tensors: torch is not installed; pip install 'recinfer[cpu]', or leave tensors out")
        self.tensors = torch_is_installed() if tensors is None else tensors
        self._credentials = ClientCredentials(token, token_file, tls_ca, tls_cert, tls_key, tls_name)
        self._longest = timeout  # seconds of the longest call so far
        self._open()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.target}>"

    def _open(self) -> None:
        """Prepare the channel; the constructor calls this last."""
        raise NotImplementedError

    def _lookup_request(self, features: Any) -> bytes:
        return encode_lookup_request(features, self.model, self.version, self.label)

    def _predict_request(self, dense: Any, features: Any, context: Any, inputs: Mapping[str, Any] | None) -> bytes:
        return encode_predict_request(
            dense, features, self.model, self.version, label=self.label, context=context, inputs=inputs
        )

    def _raw_request(self, rows: Any, context: Any) -> bytes:
        request = pb.PredictRequest(model=self.model, version=self.version, label=self.label, raw=as_raw(rows))
        if context is not None:
            request.raw_context = as_raw(context)
        return request.SerializeToString()

    def _model_request(self) -> bytes:
        return pb.GetModelRequest(model=self.model, version=self.version, label=self.label).SerializeToString()

    def _not_ready(self, seconds: float) -> UnavailableError:
        return UnavailableError(
            f"the server at {self.target} is not ready after {seconds:g} s; either none runs there, or its log says what it "
            "waits for"
        )

    def _tries(self, call: str, seconds: float, retries: int | None = None) -> Retries:
        return Retries(self.target, self.retries if retries is None else retries, seconds, self._throttles.get(call))


class InferenceClient(_Client):
    """Talks to one server. Thread-safe; keeps one channel open until ``close`` (or the end of a ``with`` block).

    Args:
        target: ``"host:port"``.
        model: model of every call; empty: the server's default.
        version: version of every call; empty: the model's default.
        timeout: seconds until a call fails, over all tries and waits.
        retries: further tries of a call that found no server or a full server, each after a longer wait, or after the wait
            that the server names.
        throttle: hold lookups and predictions back while a full server refuses many: the client sends a twentieth more than
            the server accepts, so that the server has time to answer. Held-back calls wait and try again as refused calls do.
        token: bearer token; empty: no token. ``token_file``: a file with the token, instead of ``token``.
        tls_ca: PEM file of the authority that signed the server's certificate; None: no TLS.
        tls_cert, tls_key: PEM files of this client's certificate, for mutual TLS.
        tls_name: name in the server's certificate; empty: the target's host.
            The client reads the files of the token and of certificates again when they change.
        label: label of every call's version, such as ``canary``, instead of ``version``; empty: no label.
        tensors: answers hold torch's tensors (True; torch is then imported) or numpy's arrays (False); None: tensors where torch
            is installed.

    Features are a dict of feature to list, ``{"user": [3, 4], "tags": (ids, weights)}``, a KeyedJaggedTensor, or a DataFrame or
    Table: see :func:`recinfer.columns.as_features`. All calls raise InputError (the request is wrong), NotFoundError (no
    such model or version), UnavailableError (no server answers; DeadlineError: too slow; OverloadedError: the server is
    full) or, when the server fails, RecinferError.
    """

    def _open(self) -> None:
        self._connecting = threading.Lock()
        self._retired: list[
            tuple[float, grpc.Channel]
        ] = []  # channels of old certificates, and when their calls have ended
        self._connect()

    def _connect(self) -> None:
        self._channel = channel_to(self.target, self._credentials.channel, self._credentials.options)
        self._methods = {call: self._channel.unary_unary(f"/{_SERVICE}/{call}") for call in _CALLS}
        self._methods[_CHECK] = self._channel.unary_unary(HEALTH_CHECK)

    def lookup(self, features: Any, *, timeout: float | None = None) -> Embeddings:
        """Embeddings of some or all features of the model, given in any order."""
        return decode_embeddings(self._call("Lookup", self._lookup_request(features), timeout), self.tensors)

    def predict(
        self,
        dense: Any = None,
        features: Any = None,
        *,
        context: Any = None,
        inputs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Outputs:
        """The model's outputs by name, from ``dense`` float32 ``[B, num_dense]`` and the features of the same samples.

        Every feature of the model is given, in ``features`` or in ``context``; a sample without ids has an empty list.
        ``context``: features of one sample that go with all B, a user's beside its candidates', in any form that
        features have; none of them among ``features``. Context features are sent and looked up once. A mapping may hold other
        inputs of one sample too.
        ``inputs``: the model's other inputs by name (``get_model().inputs`` lists them): tensors, arrays or lists; see
        :func:`recinfer.input_arrays.as_input`.
        """
        request = self._predict_request(dense, features, context, inputs)
        return decode_outputs(self._call("Predict", request, timeout), self.tensors)

    def predict_raw(self, rows: Any, *, context: Any = None, timeout: float | None = None) -> Outputs:
        """The model's outputs by name, from rows as the training data had them.

        The server turns the rows into ids and dense inputs by the feature contract of the model's archive. ``rows``: see
        :func:`recinfer.arrow.as_raw`; its columns are those of the contract (``get_model().contract``).
        ``context``: one row in the same form, with the columns that apply to all rows, such as a user's; ``rows`` have the
        others. Its features are sent and looked up once.
        """
        return decode_outputs(self._call("Predict", self._raw_request(rows, context), timeout), self.tensors)

    def predict_many(
        self,
        rows: Iterable[Any],
        *,
        concurrency: int = 4,
        batch_size: int = 256,
        timeout: float | None = None,
        dense: str = DENSE,
        inputs: Collection[str] = (),
        context: Any = None,
    ) -> Iterator[ScoredRow]:
        """Each row's outputs or its error, in the order of ``rows``; at most ``concurrency * batch_size`` rows are in memory.

        A row is a mapping of feature to an id, a list of ids, or a pair (a tuple) of ids and weights, with the row's numbers
        under ``"dense"``: ``{"user": 3, "clicks": [1, 2], "tags": ([4], [0.5]), "dense": [0.1, 0.2]}``. The
        numbers of a model that has a feature of this name stand under another key, which ``dense`` names. ``inputs``: the keys
        that are other inputs of the model (``[i.name for i in client.get_model().named_inputs]``), each with a number, a list
        of numbers, or a pair of a list and its weights. ``context``: of :meth:`predict`, for all rows. A RecinferError among
        ``rows`` is returned as that row's error. A refused row does not affect the others; ``timeout``: seconds for each call.

        >>> for row in client.predict_many(rows):                                   # doctest: +SKIP
        ...     print(row.index, row.outputs["output"] if row.error is None else row.error)
        """

        def ask(numbers: Any, features: Any, named: Any) -> Outputs:
            return self.predict(numbers, features, context=context, inputs=named, timeout=timeout)

        return score(ask, rows, concurrency, batch_size, dense, frozenset(inputs))

    def get_model(self, *, timeout: float | None = None) -> ModelDescription:
        """The model's inputs and structure."""
        return decode_description(self._call("GetModel", self._model_request(), timeout))

    def is_ready(self, *, timeout: float | None = None) -> bool:
        """Whether the server answers and accepts requests."""
        try:
            return self._call(_CHECK, _HEALTH_REQUEST, timeout, retries=0) == IS_SERVING
        except RecinferError:
            return False

    def wait_until_ready(self, timeout: float = 30.0) -> None:
        """Return once the server accepts requests.

        Raises:
            UnavailableError: the server did not accept requests within ``timeout`` seconds.
        """
        end = time.monotonic() + timeout
        while not self.is_ready(timeout=max(0.1, end - time.monotonic())):
            if time.monotonic() >= end:
                raise self._not_ready(timeout)
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Close the channel; calls after it fail."""
        with self._connecting:
            for _, channel in self._retired:
                channel.close()
            self._channel.close()

    def __enter__(self) -> InferenceClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, call: str, request: bytes, timeout: float | None, *, retries: int | None = None) -> bytes:
        if self._credentials.changed():
            self._reconnect()
        with client_span(call, self._credentials.metadata) as metadata:
            return self._tried(call, request, self.timeout if timeout is None else timeout, retries, metadata)

    def _tried(self, call: str, request: bytes, seconds: float, retries: int | None, metadata: Metadata) -> bytes:
        tries = self._tries(call, seconds, retries)
        self._longest = max(self._longest, seconds)
        while True:
            if (wait := tries.held_back()) is None:
                try:
                    answer: bytes = self._methods[call](request, timeout=tries.left, metadata=metadata)
                except grpc.RpcError as error:
                    if (wait := tries.failed(error)) is None:
                        raise translated(error, self.target, seconds, _START_WITH) from None
                except ValueError as error:  # gRPC raises it for a closed channel
                    raise UnavailableError(f"{self.target}: {error}; make a new client") from None
                else:
                    tries.answered()
                    return answer
            time.sleep(wait)

    def _reconnect(self) -> None:
        """Use the new certificates from now on; running calls end on the old channel."""
        with self._connecting:
            now = time.monotonic()
            for until, channel in self._retired:
                if until <= now:
                    channel.close()
            self._retired = [(until, channel) for until, channel in self._retired if until > now]
            self._retired.append((now + self._longest, self._channel))
            self._connect()


class AsyncInferenceClient(_Client):
    """An :class:`InferenceClient` for asyncio with the same arguments. All calls are awaited on the event loop of the first.

    >>> async with AsyncInferenceClient("127.0.0.1:8500") as client:            # doctest: +SKIP
    ...     found = await client.lookup({"user": [3, 4], "clicks": [[1, 2], []]})
    """

    def _open(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel: grpc.aio.Channel | None = None
        self._methods: dict[str, Any] = {}
        self._closing: set[asyncio.Task[None]] = set()  # tasks that close channels with old certificates
        self._closed = False

    async def lookup(self, features: Any, *, timeout: float | None = None) -> Embeddings:
        """See :meth:`InferenceClient.lookup`."""
        answer = await self._call("Lookup", self._lookup_request(features), timeout)
        return decode_embeddings(answer, self.tensors)

    async def predict(
        self,
        dense: Any = None,
        features: Any = None,
        *,
        context: Any = None,
        inputs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Outputs:
        """See :meth:`InferenceClient.predict`."""
        request = self._predict_request(dense, features, context, inputs)
        return decode_outputs(await self._call("Predict", request, timeout), self.tensors)

    async def predict_raw(self, rows: Any, *, context: Any = None, timeout: float | None = None) -> Outputs:
        """See :meth:`InferenceClient.predict_raw`."""
        request = self._raw_request(rows, context)
        return decode_outputs(await self._call("Predict", request, timeout), self.tensors)

    def predict_many(
        self,
        rows: Iterable[Any],
        *,
        concurrency: int = 4,
        batch_size: int = 256,
        timeout: float | None = None,
        dense: str = DENSE,
        inputs: Collection[str] = (),
        context: Any = None,
    ) -> AsyncIterator[ScoredRow]:
        """See :meth:`InferenceClient.predict_many`; read the rows with ``async for``."""

        async def ask(numbers: Any, features: Any, named: Any) -> Outputs:
            return await self.predict(numbers, features, context=context, inputs=named, timeout=timeout)

        return score_async(ask, rows, concurrency, batch_size, dense, frozenset(inputs))

    async def get_model(self, *, timeout: float | None = None) -> ModelDescription:
        """See :meth:`InferenceClient.get_model`."""
        return decode_description(await self._call("GetModel", self._model_request(), timeout))

    async def is_ready(self, *, timeout: float | None = None) -> bool:
        """See :meth:`InferenceClient.is_ready`."""
        try:
            return await self._call(_CHECK, _HEALTH_REQUEST, timeout, retries=0) == IS_SERVING
        except RecinferError:
            return False

    async def wait_until_ready(self, timeout: float = 30.0) -> None:
        """See :meth:`InferenceClient.wait_until_ready`."""
        end = time.monotonic() + timeout
        while not await self.is_ready(timeout=max(0.1, end - time.monotonic())):
            if time.monotonic() >= end:
                raise self._not_ready(timeout)
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """Close the channel; running and later calls fail."""
        self._closed = True
        for task in self._closing:
            task.cancel()
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> AsyncInferenceClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, call: str, request: bytes, timeout: float | None, *, retries: int | None = None) -> bytes:
        if self._credentials.changed():
            self._retire()
        with client_span(call, self._credentials.metadata) as metadata:
            return await self._tried(call, request, self.timeout if timeout is None else timeout, retries, metadata)

    async def _tried(self, call: str, request: bytes, seconds: float, retries: int | None, metadata: Metadata) -> bytes:
        tries = self._tries(call, seconds, retries)
        self._longest = max(self._longest, seconds)
        while True:
            if (wait := tries.held_back()) is None:
                try:
                    answer: bytes = await self._method(call)(request, timeout=tries.left, metadata=metadata)
                except grpc.RpcError as error:
                    if (wait := tries.failed(error)) is None:
                        raise translated(error, self.target, seconds, _START_WITH) from None
                except grpc.aio.UsageError:
                    raise self._is_closed() from None
                except asyncio.CancelledError:
                    task = asyncio.current_task()
                    if not self._closed or task is None or task.cancelling():
                        raise
                    # gRPC cancels a call whose channel is closed; the task itself was not cancelled.
                    raise self._is_closed() from None
                else:
                    tries.answered()
                    return answer
            await asyncio.sleep(wait)

    def _method(self, call: str) -> Any:
        """gRPC's method for ``call``; the first call opens the channel, on its event loop."""
        loop = asyncio.get_running_loop()
        if self._closed:
            raise self._is_closed()
        if self._channel is None:
            self._loop = loop
            credentials, options = self._credentials.channel, self._credentials.options
            if credentials is None:
                self._channel = grpc.aio.insecure_channel(self.target, options=options)
            else:
                self._channel = grpc.aio.secure_channel(self.target, credentials, options=options)
            self._methods = {call: self._channel.unary_unary(f"/{_SERVICE}/{call}") for call in _CALLS}
            self._methods[_CHECK] = self._channel.unary_unary(HEALTH_CHECK)
        elif loop is not self._loop:
            raise InputError("this client made its first call on another event loop; make one for each loop")
        return self._methods[call]

    def _retire(self) -> None:
        """Open a channel with the new certificates at the next call; running calls end on the old channel."""
        channel, self._channel = self._channel, None
        if channel is not None:
            task = asyncio.create_task(channel.close(self._longest))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _is_closed(self) -> UnavailableError:
        return UnavailableError(f"{self.target}: the client is closed; make a new client")
