"""TorchServe's handler for archives: a thin adapter to recinfer.inference and recinfer.serving.

A request body is recinfer's protobuf (``application/octet-stream``) or JSON (``application/json``), the response has
the same format. The call is Predict unless the request names ``lookup``: over REST in the header ``X-Recinfer-Method``,
over TorchServe's gRPC in an input named ``method`` next to the input ``body``. docs/how-to/torchserve.md shows both.

The archive is not in the model file: ``handler.archive`` in the model's config names its folder, which is
memory-mapped.
"""

import json
import logging
import math
from pathlib import Path

from ts.utils.util import PredictionException

from recinfer.errors import InputError, RecinferError
from recinfer.inference.predictor import load
from recinfer.serving.engine.decoded_path import InferenceService
from recinfer.serving.engine.dispatcher import Dispatcher
from recinfer.serving.engine.registry import ModelRegistry
from recinfer.serving.engine.scheduler import BatchConfig
from recinfer.serving.wire import json_codec
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.status import status_of

_METHOD_HEADER = "X-Recinfer-Method"
_ANSWER_HEAD = 4096
_log = logging.getLogger(__name__)


class RecinferHandler:
    """Loads one archive in a TorchServe worker and answers requests on it."""

    def initialize(self, context):
        """Map the archive that the model's config names. TorchServe reports a RuntimeError as a failure of the
        model."""
        config = (context.model_yaml_config or {}).get("handler") or {}
        archive = config.get("archive")
        if not archive:
            raise RuntimeError("the model's config has no handler.archive; pack the archive with: recinfer mar")
        try:
            predictor = load(Path(archive), preload=bool(config.get("preload", False)))
        except (RecinferError, OSError) as error:
            raise RuntimeError(f"cannot load the archive {archive}: {error}") from error
        # All answers of a batch travel to the frontend in one message, and one that is too long kills the worker: each
        # gets its share, less what surrounds it.
        batch_size = max(1, int(context.system_properties.get("batch_size") or 1))
        self._max_answer = int(config.get("max_response_bytes", 6_500_000)) // batch_size - _ANSWER_HEAD
        limits = Limits(max_response_bytes=max(1, self._max_answer))
        service = InferenceService(ModelRegistry({predictor.manifest.model: predictor}), limits)
        # TorchServe's own queue is the bound: every request that it passes on is answered.
        self._dispatcher = Dispatcher(service, BatchConfig(max_queue=2**31 - 1), threads=1)

    def handle(self, data, context):
        """Answer a batch of requests: requests share lookups and dense runs where possible; a failed request does not
        affect the others."""
        answers, asked = [None] * len(data), []
        for index, row in enumerate(data):
            try:
                asked.append((index, *self._asked(row, index, context)))
            except Exception as error:
                answers[index] = error
        found = self._dispatcher.answer_all([(call, message) for _, call, message, _ in asked], math.inf)
        for (index, call, _, is_json), answer in zip(asked, found):
            answers[index] = self._sent(answer, call, is_json, index, context)
        for error in answers:
            if isinstance(error, Exception) and not isinstance(error, RecinferError):
                # A bug of ours: the log has it, the caller gets INTERNAL and not a retryable code.
                _log.error("a request failed", exc_info=error)
        if len(answers) == 1 and isinstance(answers[0], Exception):
            # Alone in its batch: TorchServe turns this into the HTTP code and into the gRPC status with its meaning.
            status = status_of(answers[0])
            raise PredictionException(status.message, status.http) from answers[0]
        return [self._encode_error(a, i, context) if isinstance(a, Exception) else a for i, a in enumerate(answers)]

    def _asked(self, row, index, context):
        """The request's kind of call, its message, and whether it is JSON."""
        method = _method(row, index, context)
        call = "Lookup" if method == "lookup" else "Predict"
        body = row.get("body", row.get("data"))
        if body is None:
            raise InputError("body: got nothing, expected a serialized recinfer.v1 request or a JSON object")
        if isinstance(body, dict) or _is_json(index, context):
            encode = json_codec.lookup_request if method == "lookup" else json_codec.predict_request
            return call, encode(_json_object(body)), True
        if not isinstance(body, (bytes, bytearray)):
            raise InputError(f"body: got {type(body).__name__}, expected bytes or a JSON object")
        return call, bytes(body), False

    def _sent(self, answer, call, is_json, index, context):
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

    def _encode_error(self, error, index, context):
        # In a batch, an exception would fail the neighbours too, so the answer itself says what went wrong. REST has
        # the HTTP code beside it; TorchServe's gRPC drops that code, so its callers look for {"error": ...}.
        status = status_of(error)
        context.set_response_status(status.http, status.code, index)
        context.set_response_content_type(index, "application/json")
        return json.dumps({"error": {"code": status.code, "message": status.message}})


def _method(row, index, context):
    named = row.get("method") or context.get_request_header(index, _METHOD_HEADER) or "predict"
    method = bytes(named).decode("utf-8", "replace") if isinstance(named, (bytes, bytearray)) else str(named)
    if method not in ("predict", "lookup"):
        raise InputError(f"method: got {method[:80]!r}, expected 'predict' or 'lookup'")
    return method


def _is_json(index, context):
    kind = (context.get_request_header(index, "Content-Type") or "").partition(";")[0]
    return kind.strip().lower() == "application/json"  # names of types have no case


def _json_object(body):
    # TorchServe has parsed a JSON body already, unless it is malformed: then it passes the text on.
    if isinstance(body, (bytes, bytearray, str)):
        return json_codec.parse_json(bytes(body) if isinstance(body, bytearray) else body)
    if not isinstance(body, dict):
        raise InputError(f"body: got a JSON {type(body).__name__}, expected an object")
    return body
