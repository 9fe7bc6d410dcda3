"""Load with real requests."""

from __future__ import annotations

from typing import Any

import numpy as np

from recinfer.serving.client.client import InferenceClient
from recinfer.serving.server.server import Server
from recinfer.sizing.load import Driver


def test_the_request_that_opens_the_connection_has_its_own_timeout(server: Server, monkeypatch: Any) -> None:
    """A server that has just started, or answers requests of an overload, may need longer than a measured request has."""
    with InferenceClient(server.target) as client:
        model = client.get_model()
    with Driver(server.target, "lookup", [b""], timeout=0.05) as driver:
        timeouts = []
        real = driver._client._call

        async def noted(call: str, data: bytes, timeout: float) -> Any:
            timeouts.append(timeout)
            return await real("GetModel", data, timeout)

        monkeypatch.setattr(driver._client, "_call", noted)
        driver.run(np.arange(3) * 0.01)
    assert model.version
    assert timeouts[0] > 10 and timeouts[1:] == [0.05] * 3
