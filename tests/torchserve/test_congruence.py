"""Random requests through TorchServe's REST and gRPC doors give the numbers of the predictor in this process."""

from __future__ import annotations

import pytest
import torch

from recinfer.inference.predictor import Predictor
from recinfer.serving import codec
from recinfer.serving.torchserve_client import TorchServeClient
from tests.serving.conftest import ROWS, make_request
from tests.torchserve.instance import TorchServe

pytestmark = pytest.mark.slow

TOLERANCE = {"rtol": 0, "atol": 1e-6}
OCTETS = "application/octet-stream"


def test_random_requests(torchserve: TorchServe, predictor: Predictor, request: pytest.FixtureRequest):
    with TorchServeClient(torchserve.grpc_target, "tiny", token=torchserve.inference_key, timeout=30) as client:
        for seed in range(request.config.getoption("--congruence") // 5):
            batch = 1 + seed * 7 % 33
            dtype = torch.int32 if seed % 4 == 3 else torch.int64
            if seed % 2:
                subset = [key for bit, key in enumerate(ROWS) if (seed % 15 + 1) >> bit & 1]
                _, kjt = make_request(seed, batch, keys=subset, dtype=dtype)
                expected = predictor.lookup(kjt).pooled.values()
                body = codec.encode_lookup_request(kjt)
                reply = torchserve.predict("tiny", body, OCTETS, X_Recinfer_Method="lookup")
                over_rest = codec.decode_lookup_response(reply.body)[0].values()
                over_grpc = client.lookup(kjt).pooled.values()
            else:
                dense, kjt = make_request(seed, batch, dtype=dtype)
                expected = predictor.predict(dense, kjt)["output"]
                reply = torchserve.predict("tiny", codec.encode_predict_request(dense, kjt), OCTETS)
                over_rest = codec.decode_predict_response(reply.body)[0]["output"]
                over_grpc = client.predict(dense, kjt)["output"]
            torch.testing.assert_close(over_rest, expected, **TOLERANCE)
            torch.testing.assert_close(over_grpc, expected, **TOLERANCE)
