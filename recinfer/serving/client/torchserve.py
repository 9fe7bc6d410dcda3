"""A client of an archive behind TorchServe's gRPC: the calls of InferenceClient, with TorchServe's token.

TorchServe's ``PredictionsRequest`` is {model_name = 1, model_version = 2, map<string, bytes> input = 3} and its answer
{bytes prediction = 1}: few enough fields to write here, so that no generated code of another project is needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from google.protobuf.wrappers_pb2 import BytesValue

from recinfer.inference.specs import Outputs
from recinfer.serving.client.answers import Embeddings, decode_embeddings, decode_outputs, torch_is_installed
from recinfer.serving.client.calls import channel_to, check_target, invoke, security_of
from recinfer.serving.client.retry import LONGEST_S
from recinfer.serving.wire.arrays import bytes_field, encode_lookup_request, encode_predict_request
from recinfer.serving.wire.status import error_of
from recinfer.serving.wire.tls import authorization

__all__ = ["TorchServeClient", "error_in"]

_PREDICTIONS = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
_KEEPALIVE_MS = 5_000
_ERROR_HEAD = b'{"error": '


class TorchServeClient:
    """Talks to one model of a TorchServe that ``recinfer mar`` packed. Thread-safe; ``close`` it or use ``with``.

    Args:
        target: ``"host:port"`` of TorchServe's gRPC inference address (its default port is 7070).
        model: the model's name in TorchServe.
        token: the inference key of its ``key_file.json``; empty where token authorization is off.
        version: version of every call; empty: the model's default version.
        timeout: seconds until a call fails.

    Features, dense inputs and errors are those of InferenceClient.
    """

    def __init__(self, target: str, model: str, *, token: str = "", version: str = "", timeout: float = 10.0) -> None:
        check_target(target)
        self.target = target
        self.model = model
        self.version = version
        self.timeout = timeout
        self._metadata = (("protocol", "gRPC"), *authorization(token)) if token else ()
        credentials, options = security_of(None, None, None, "")
        self._channel = channel_to(target, credentials, [*options, ("grpc.keepalive_time_ms", _keepalive_ms(timeout))])
        self._predictions = self._channel.unary_unary(_PREDICTIONS)

    def lookup(self, features: Any) -> Embeddings:
        """Embeddings of some or all features of the model, given in any order."""
        answer = self._call("lookup", encode_lookup_request(features))
        return decode_embeddings(answer, torch_is_installed())

    def predict(
        self, dense: Any = None, features: Any = None, *, context: Any = None, inputs: Mapping[str, Any] | None = None
    ) -> Outputs:
        """The model's outputs by name, from ``dense`` float32 ``[B, num_dense]`` and the features of the same samples.

        ``dense``: None for a model that takes none. ``context``: features of one sample that go with all B, none of them in
        ``features``. ``inputs``: the model's other inputs by name, see :func:`recinfer.input_arrays.as_input`.
        """
        body = encode_predict_request(dense, features, context=context, inputs=inputs)
        return decode_outputs(self._call("predict", body), torch_is_installed())

    def close(self) -> None:
        """Close the channel; calls after it fail."""
        self._channel.close()

    def __enter__(self) -> TorchServeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: str, body: bytes) -> bytes:
        inputs = {"method": method.encode(), "body": body}
        entries = (bytes_field(3, *bytes_field(1, key.encode()), *bytes_field(2, inputs[key])) for key in inputs)
        parts = [*bytes_field(1, self.model.encode()), *(part for entry in entries for part in entry)]
        if self.version:
            parts += bytes_field(2, self.version.encode())
        reply = invoke(
            self._predictions,
            b"".join(parts),
            self.target,
            self.timeout,
            start_with="torchserve --start --model-store DIR",
            metadata=self._metadata,
        )
        answer = BytesValue.FromString(reply).value  # one bytes field with number 1, as in PredictionResponse
        if error := error_in(answer):
            raise error
        return answer


def _keepalive_ms(timeout: float) -> int:
    """Milliseconds between two pings, at least a third of ``timeout``.

    TorchServe's gRPC server closes a connection at the fourth ping without an answer in between, so pings at a short fixed
    interval would cut off a call that takes nearly ``timeout`` seconds.
    """
    return max(_KEEPALIVE_MS, math.ceil(1000 * min(timeout, LONGEST_S) / 3))


def error_in(answer: bytes) -> Exception | None:
    """The error in ``answer``, or None for an ordinary answer.

    In a batch of several requests the handler can give a failed request no status of its own over TorchServe's gRPC, so its
    answer is ``{"error": {"code": ..., "message": ...}}``, which is no protobuf message.
    """
    if not answer.startswith(_ERROR_HEAD):
        return None
    error = json.loads(answer)["error"]
    return error_of(error["code"], error["message"])
