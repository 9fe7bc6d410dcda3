"""The protocols of the HTTP port, one entry each: servers mount them, and the command line names them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["HTTP_PROTOCOLS", "RegisteredProtocol"]


class RegisteredProtocol(NamedTuple):
    """A protocol that every HTTP port answers.

    Attributes:
        name: short, for the line with the port's address.
        title: for help texts.
        place: ``module:class`` of a recinfer.serving.server.http_server.ModelProtocol. A server that has an HTTP port
            imports it; the command line needs no aiohttp.
    """

    name: str
    title: str
    place: str


HTTP_PROTOCOLS = (
    RegisteredProtocol("V1", "TensorFlow Serving's V1", "recinfer.serving.server.v1.protocol:V1"),
    RegisteredProtocol(
        "Open Inference", "the Open Inference Protocol", "recinfer.serving.server.open_inference_rest:OpenInferenceRest"
    ),
)
