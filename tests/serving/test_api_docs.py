"""``/openapi.json`` holds for the served models, and ``/docs`` shows it without another host."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from recinfer.inference.predictor import Predictor
from recinfer.serving.engine.memory_budget import Ticket
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.server.api_docs.schemas import ModelSchemas, open_object
from recinfer.serving.server.security import Security
from recinfer.serving.server.server import Server
from recinfer.serving.wire.limits import Limits
from tests.serving.conftest import NUM_DENSE, ROWS
from tests.serving.tasks import COLUMNS, tasks_archive, tasks_predictor
from tests.serving.test_sequences import predictors
from tests.serving.v1 import get, post

web = pytest.importorskip("aiohttp.web", reason="aiohttp is not installed (the serve extra)")
validator = pytest.importorskip(
    "openapi_spec_validator", reason="openapi-spec-validator is not installed (the dev extra)"
)

from recinfer.serving.server.api_docs.document import document as openapi  # noqa: E402
from recinfer.serving.server.http_server import Described, Post, Route  # noqa: E402

__all__ = ["predictors", "tasks_archive", "tasks_predictor"]


@pytest.fixture(scope="module")
def server(predictor: Predictor, predictors: dict[str, Predictor], tasks_predictor: Predictor) -> Iterator[Server]:
    """A server of models of every kind, one with a name that needs quoting."""
    models = {"tiny": predictor, "two tasks/v:1": tasks_predictor, **predictors}
    with Server(models, http_port=0, limits=Limits(max_batch=64)) as running:
        registry = running.service.registry
        registry.set_labels("tiny", {"stable": registry.get("tiny").version})
        yield running


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    """The document of that server."""
    code, headers, found = get(server, "/openapi.json")
    assert code == 200 and headers["Content-Type"].startswith("application/json")
    return found


def test_a_validator_accepts_it(document: dict[str, Any]):
    assert document["openapi"] == "3.1.0"
    validator.OpenAPIV31SpecValidator(document).validate()


def test_it_has_the_models_features_columns_and_limits(document: dict[str, Any]):
    schemas = document["components"]["schemas"]
    assert schemas["tiny.PredictRows"]["properties"]["instances"]["maxItems"] == 64
    properties = schemas["tiny.PredictRow"]["properties"]
    assert properties.keys() == {*ROWS, "dense"}
    assert properties["dense"]["minItems"] == properties["dense"]["maxItems"] == NUM_DENSE
    assert properties["user"]["anyOf"][1] == {"type": "integer", "format": "int64", "minimum": 0, "maximum": 49}
    assert schemas["tiny.PredictInputs"]["properties"]["user"]["type"] == "array"
    assert set(COLUMNS) < schemas["two_tasks_v_1.1.PredictRow"]["properties"].keys()
    assert {"/v1/models/tiny:predict", "/v1/models/tiny/labels/{label}:lookup", "/v2/models/tiny/infer"} < document[
        "paths"
    ].keys()
    assert "/v1/models/weighted:predict" not in document["paths"]  # it only looks up
    assert [path for path in document["paths"] if "labels" in path and "/tiny/" not in path] == []  # they have none


def test_each_example_is_a_request_that_is_answered_as_described(server: Server, document: dict[str, Any]):
    schema_validator = pytest.importorskip("openapi_schema_validator").OAS31Validator

    def schema_of(content: dict[str, Any]) -> dict[str, Any]:
        return {**content["application/json"]["schema"], "components": document["components"]}

    asked = 0
    for path, item in document["paths"].items():
        for method, operation in item.items():
            for parameter in operation.get("parameters", []):
                path = path.replace(f"{{{parameter['name']}}}", parameter["schema"]["default"])
            answers = operation["responses"]["200"]["content"]
            if method == "get":
                code, _, found = get(server, path)
                assert code == 200, (path, found)
                schema_validator(schema_of(answers)).validate(found)
                continue
            request = operation["requestBody"]["content"]
            for example in request["application/json"]["examples"].values():
                schema_validator(schema_of(request)).validate(example["value"])
                code, _, found = post(server, path, example["value"])
                assert code == 200, (path, found)
                schema_validator(schema_of(answers)).validate(found)
                asked += 1
    assert asked > 30


def test_the_page_and_its_files_are_here(server: Server):
    pytest.importorskip("swagger_ui", reason="swagger-ui-py is not installed (the serve extra)")
    root = f"http://127.0.0.1:{server.http_port}"
    with urllib.request.urlopen(root + "/docs") as answer:
        page, policy = answer.read().decode(), answer.headers["Content-Security-Policy"]
    assert "http" not in page and "http" not in policy and policy.startswith("default-src 'none'")
    files = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(files) == 4
    for name in files:
        with urllib.request.urlopen(f"{root}/{name}") as answer:
            assert answer.status == 200 and answer.read()


def test_a_browser_is_asked_for_the_token(predictor: Predictor):
    with Server({"tiny": predictor}, http_port=0, security=Security(token="0123456789abcdef")) as server:
        for path in ("/docs", "/openapi.json", "/docs/start.js"):
            code, headers, _ = get(server, path)
            assert code == 401 and headers["WWW-Authenticate"].startswith("Basic ")
        _, _, document = get(server, "/openapi.json", Authorization="Basic OjAxMjM0NTY3ODlhYmNkZWY=")
        validator.OpenAPIV31SpecValidator(document).validate()
        assert document["security"] == [{"token": []}]
        assert document["paths"]["/v2/health/live"]["get"]["security"] == []


class Count:
    """A protocol of one route, as another one would be added."""

    about = "**Count** is a protocol of this test"
    paths = "/count/MODEL"

    def __init__(self, *_: Any) -> None:
        pass

    def routes(self) -> list[Route]:
        described = Described("count", "Features of {model}", "count", "CountResponse", "CountRequest")
        return [Post("/count/{model}/{version}", "Count", self.count, described)]

    def add_schemas(self, model: ServedModel, schemas: ModelSchemas) -> None:
        schemas.add("CountRequest", open_object({}, []))
        schemas.add("CountResponse", open_object({"features": {"type": "integer"}}, ["features"]))
        schemas.examples["CountRequest"] = {"all": {}}

    async def count(self, request: web.Request, body: bytearray, ticket: Ticket) -> web.Response:
        raise NotImplementedError


def test_the_routes_and_schemas_of_a_protocol_are_its_part(predictor: Predictor):
    found = openapi([Count()], ModelRegistry({"a b": predictor}), Limits(), needs_token=False)
    validator.OpenAPIV31SpecValidator(found).validate()
    assert Count.about in found["info"]["description"]
    assert [*found["paths"]] == ["/count/a%20b/{version}"] and found["tags"] == [{"name": "count"}]
    operation = found["paths"]["/count/a%20b/{version}"]["post"]
    assert (operation["summary"], operation["operationId"]) == ("Features of a b", "a_b.0.count_version")
    assert operation["parameters"][0]["name"] == "version"
    body = operation["requestBody"]["content"]["application/json"]
    assert body == {"schema": {"$ref": "#/components/schemas/a_b.0.CountRequest"}, "examples": {"all": {"value": {}}}}
    assert found["components"]["schemas"].keys() == {"Error", "a_b.0.CountRequest", "a_b.0.CountResponse"}
