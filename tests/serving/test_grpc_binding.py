"""The names of grpcio's binding that recinfer uses, and how each is called. If this fails with a new grpcio, look
at what grpc/_server.py of that release does, and do the same.
"""

from __future__ import annotations

import ast
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from packaging.requirements import Requirement

from recinfer.serving.server.grpc_binding import PARTS, check_binding, cygrpc
from tests.sources import nodes_of, tree_of

ROOT = Path(__file__).resolve().parents[2]


def test_one_file_imports_the_binding_and_names_all_that_is_used() -> None:
    used: dict[str, set[str]] = {}
    for path in (ROOT / "recinfer").rglob("*.py"):
        tree = tree_of(path)
        for node in nodes_of(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("grpc._"):
                assert path.name == "grpc_binding.py", f"{path} imports {node.module}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "cygrpc":
                used.setdefault(node.attr, set())
            inner = node.value if isinstance(node, ast.Attribute) else None
            if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "cygrpc":
                used.setdefault(inner.attr, set()).add(node.attr)  # type: ignore[union-attr]
    assert "Server" in used
    for kind, names in used.items():
        assert kind in PARTS, f"cygrpc.{kind} is used and not named in PARTS"
        assert names <= set(PARTS[kind]), f"cygrpc.{kind}: {names - set(PARTS[kind])}"


def test_the_installed_grpcio_has_them_and_is_one_that_was_tried() -> None:
    check_binding(cygrpc, grpc.__version__)
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (grpcio,) = (r for r in map(Requirement, needed) if r.name == "grpcio")
    assert any(each.operator == "<" for each in grpcio.specifier), "grpcio has no cap: its binding may change"
    assert grpcio.specifier.contains(grpc.__version__)


def test_what_is_missing_is_named() -> None:
    parts = {kind: SimpleNamespace(**dict.fromkeys(names)) for kind, names in PARTS.items()}
    check_binding(SimpleNamespace(**parts), "9")
    del parts["CompletionQueue"]
    del parts["Server"].destroy
    with pytest.raises(ImportError, match=r"grpcio 9 lacks CompletionQueue, Server.destroy, .*pip install"):
        check_binding(SimpleNamespace(**parts), "9")


def test_one_call_from_end_to_end_in_the_shapes_that_are_used() -> None:
    server, events = cygrpc.Server((("grpc.so_reuseport", 0),), False), cygrpc.CompletionQueue()
    server.register_completion_queue(events)
    port = server.add_http2_port(b"127.0.0.1:0")
    assert port > 0
    server.start()

    def next_event(queue: object = events) -> object:
        return queue.poll(time.time() + 60)  # type: ignore[attr-defined]

    assert events.poll(time.time()).completion_type == cygrpc.CompletionType.queue_timeout
    server.request_call(events, events, "called")
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    answer = channel.unary_unary("/a.B/C").future(b"question", timeout=60, metadata=(("a", "b"),))

    called = next_event()
    assert (called.tag, called.success) == ("called", True)  # type: ignore[attr-defined]
    assert called.call_details.method == b"/a.B/C"  # type: ignore[attr-defined]
    assert called.call_details.deadline > time.time()  # type: ignore[attr-defined]
    assert ("a", "b") in called.invocation_metadata  # type: ignore[attr-defined]
    call = called.call  # type: ignore[attr-defined]
    call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), "received")
    received = next_event()
    (message,) = received.batch_operations  # type: ignore[attr-defined]
    assert message.message() == b"question"
    ending = (
        cygrpc.SendInitialMetadataOperation((), 0),
        cygrpc.SendMessageOperation(b"answer", 0),
        cygrpc.SendStatusFromServerOperation((("c", "d"),), cygrpc.StatusCode.unknown, b"why", 0),
        cygrpc.ReceiveCloseOnServerOperation(0),
    )
    call.start_server_batch(ending, "ended")

    assert (answer.code(), answer.details()) == (grpc.StatusCode.UNKNOWN, "why")
    assert ("c", "d") in [tuple(pair) for pair in answer.trailing_metadata()]
    ended = next_event()
    assert not ended.batch_operations[-1].cancelled()  # type: ignore[attr-defined]
    channel.close()
    del called, call, received, message, ended
    server.shutdown(events, "shut")
    server.cancel_all_calls()
    assert next_event().tag == "shut"  # type: ignore[attr-defined]
    server.destroy()
