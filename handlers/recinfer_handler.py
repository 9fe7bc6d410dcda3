"""TorchServe's handler for archives: a thin adapter to recinfer.inference and recinfer.serving.

A request body is recinfer's protobuf (``application/octet-stream``) or JSON (``application/json``); its response has
the same format. The call is Predict unless the request names ``lookup``: over REST in the header ``X-Recinfer-Method``,
over TorchServe's gRPC in an input named ``method`` next to the input ``body``. docs/how-to/torchserve.md shows both.

The model file (.mar) does not contain the archive: ``handler.archive`` in the model's config names the archive's
folder, which the handler maps into memory.
"""

import json
import logging
import math
from pathlib import Path
from typing import Any

from ts.utils.util import PredictionException

from recinfer.errors import InputError, RecinferError
from recinfer.inference.predictor import load
from recinfer.serving.engine.decoded_path import InferenceService
from recinfer.serving.engine.dispatcher import Dispatcher
from recinfer.serving.engine.registry import ModelRegistry
from recinfer.serving.engine.request import CallName
from recinfer.serving.wire import json_codec
from recinfer.serving.wire.limits import BatchConfig, Limits
from recinfer.serving.wire.status import status_of

_METHOD_HEADER = "X-Recinfer-Method"
_ANSWER_HEAD = 4096
_log = logging.getLogger(__name__)


class RecinferHandler:
    """Loads one archive in a TorchServe worker and answers requests on it."""

    def initialize(self, context: Any) -> None:
        """Map the archive that the model's config (a :class:`ts.context.Context`) names.

        Raises RuntimeError, which TorchServe reports as a failure of the model.
        """
        config = (context.model_yaml_config or {}).get("handler") or {}
        archive = config.get("archive")
        if not archive:
            raise RuntimeError("the model's config has no handler.archive; pack the archive with: recinfer mar")
        try:
            predictor = load(Path(archive), preload=bool(config.get("preload", False)))
        except (RecinferError, OSError) as error:
            raise RuntimeError(f"cannot load the archive {archive}: {error}") from error
        # The worker sends all answers of a batch to TorchServe's frontend in one message, and a message over the limit
        # kills the worker. So each answer may take an equal share of it, less the bytes of its header.
        batch_size = max(1, int(context.system_properties.get("batch_size") or 1))
        self._max_answer = int(config.get("max_response_bytes", 6_500_000)) // batch_size - _ANSWER_HEAD
        limits = Limits(max_response_bytes=max(1, self._max_answer))
        service = InferenceService(ModelRegistry({predictor.manifest.model: predictor}), limits)
        # TorchServe's own queue refuses requests; the handler answers every request that TorchServe passes on.
        self._dispatcher = Dispatcher(service, BatchConfig(max_queue=2**31 - 1), threads=1)

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[bytes | str]:
        """Answer a batch of requests, one answer per request in their order.

        The requests share lookups and dense runs where possible; a failed request does not affect the others.
        """
        answers: list[Any] = [None] * len(data)  # bytes, JSON text or an exception
        requests: list[tuple[int, CallName, bytes, bool]] = []
        for index, row in enumerate(data):
            try:
                requests.append((index, *self._request(row, index, context)))
            except Exception as error:
                answers[index] = error
        found = self._dispatcher.answer_all([(call, message) for _, call, message, _ in requests], math.inf)
        for (index, call, _, is_json), answer in zip(requests, found):
            answers[index] = self._response(answer, call, is_json, index, context)
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, RecinferError):
                # A bug of recinfer: the log has the traceback, and the caller gets INTERNAL, which clients don't retry.
                _log.error("a request failed", exc_info=answer)
        if len(answers) == 1 and isinstance(answers[0], Exception):
            # Alone in its batch: TorchServe turns this into the HTTP code and into the gRPC status with its meaning.
            status = status_of(answers[0])
            raise PredictionException(status.message, status.http) from answers[0]
        return [self._encode_error(a, i, context) if isinstance(a, Exception) else a for i, a in enumerate(answers)]

    def _request(self, row: dict[str, Any], index: int, context: Any) -> tuple[CallName, bytes, bool]:
        """The request's call (``Lookup`` or ``Predict``), its message, and whether it is JSON."""
        method = _method(row, index, context)
        call: CallName = "Lookup" if method == "lookup" else "Predict"
        body = row.get("body", row.get("data"))
        if body is None:
            raise InputError("body: got nothing, expected a serialized recinfer.v1 request or a JSON object")
        if isinstance(body, dict) or _is_json(index, context):
            encode = json_codec.lookup_request if method == "lookup" else json_codec.predict_request
            return call, encode(_json_object(body)), True
        if not isinstance(body, (bytes, bytearray)):
            raise InputError(f"body: got {type(body).__name__}, expected bytes or a JSON object")
        return call, bytes(body), False

    def _response(self, answer: Any, call: str, is_json: bool, index: int, context: Any) -> bytes | str | Exception:
        """The response in the format of its request, or the error."""
        if isinstance(answer, Exception):
            return answer
        if is_json:
            form = json_codec.lookup_response if call == "Lookup" else json_codec.predict_response
            answer = json_codec.json_text(form(answer))
        if len(answer) > self._max_answer:
            return InputError(
                f"request: its response has {len(answer)} bytes, expected at most {self._max_answer} "
                f"(max_response_bytes of the model's config); send fewer samples per request"
            )
        context.set_response_content_type(index, "application/json" if is_json else "application/octet-stream")
        return answer

    def _encode_error(self, error: Exception, index: int, context: Any) -> str:
        # In a batch, an exception would fail the other requests too, so the answer itself carries the error. REST
        # callers also get the HTTP code; TorchServe's gRPC drops that code, so its callers look for {"error": ...}.
        status = status_of(error)
        context.set_response_status(status.http, status.code, index)
        context.set_response_content_type(index, "application/json")
        return json.dumps({"error": {"code": status.code, "message": status.message}})


def _method(row: dict[str, Any], index: int, context: Any) -> str:
    named = row.get("method") or context.get_request_header(index, _METHOD_HEADER) or "predict"
    method = bytes(named).decode("utf-8", "replace") if isinstance(named, (bytes, bytearray)) else str(named)
    if method not in ("predict", "lookup"):
        raise InputError(f"method: got {method[:80]!r}, expected 'predict' or 'lookup'")
    return method


def _is_json(index: int, context: Any) -> bool:
    kind = (context.get_request_header(index, "Content-Type") or "").partition(";")[0]
    return kind.strip().lower() == "application/json"  # media types are case-insensitive


def _json_object(body: Any) -> dict[str, Any]:
    # TorchServe parses a JSON body; a malformed one it passes on as text.
    if isinstance(body, (bytes, bytearray, str)):
        return json_codec.parse_json(bytes(body) if isinstance(body, bytearray) else body)
    if not isinstance(body, dict):
        raise InputError(f"body: got a JSON {type(body).__name__}, expected an object")
    return body
