"""The verbs of the admin service, one entry each: the server, its workers, its log, the client and the command line read them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.message import Message

__all__ = ["VERBS", "Command", "Verb"]


@dataclass(frozen=True)
class Command:
    """A command of ``recinfer admin``.

    Attributes:
        name, help: as ``recinfer admin --help`` shows them.
        example: its options, without the server.
        flags: help texts of the options that are bool fields of the request, by name.
    """

    name: str
    help: str
    example: str
    flags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Verb:
    """A method of the service in admin.proto; recinfer.serving.client.admin.AdminClient has a method of the same name.

    Attributes:
        apply: makes the change, with a recinfer.serving.engine.store.StoreManager and the request. The log has the request
            as ``apply`` leaves it.
        undo: the verb that takes the change back, with the same request, in the workers that made it if another worker
            could not; empty: the shares and labels from before are enough; None: no verb does.
        subject: what the log's line has behind the model.
        done: the command line's line after the change, with fields of the request in braces.
        version: for ``done``, where the request names no version; empty: it must name one; None: it has no such field.
        command: None: another verb's command makes the change too, or the verb makes none.
    """

    name: str
    apply: Callable[[Any, Any], object]
    undo: str | None = None
    subject: Callable[[Any], str] = lambda request: request.version
    done: str = ""
    version: str | None = None
    command: Command | None = None

    @property
    def request(self) -> type[Message]:
        """The class of the verb's requests."""
        from recinfer.serving.wire.proto import admin_pb2  # commands that call no server do without protobuf

        return getattr(admin_pb2, f"{self.name}Request")  # type: ignore[no-any-return]

    @property
    def method(self) -> str:
        """The name of the client's method."""
        return re.sub("(?<=[a-z])(?=[A-Z])", "_", self.name).lower()

    @property
    def changes(self) -> bool:
        """Whether the server's models may differ after a call."""
        return "change" in self.request.DESCRIPTOR.fields_by_name


def _load(manager: Any, request: Any) -> None:
    request.version = manager.load(request.model, request.version, activate=request.activate)


_VERBS = (
    Verb(
        "Load",
        _load,
        undo="Unload",
        subject=lambda request: f"{request.version} and made the default" if request.activate else request.version,
        done="loaded {model} {version}",
        version="(the newest)",
        command=Command(
            "load",
            "Load a version from the model store, check it and warm it up. Without --version: the newest. Succeeds if already "
            "loaded.",
            '--model movies --version 8 --activate --reason "release 8"',
            {"activate": "Also make this version the default."},
        ),
    ),
    Verb(
        "Unload",
        lambda manager, request: manager.unload(request.model, request.version),
        done="unloaded {model} {version}",
        version="",
        command=Command(
            "unload",
            "Stop serving a version. Requests already running on it complete.",
            "--model movies --version 7",
        ),
    ),
    Verb("ListModels", lambda manager, request: None),
    Verb(
        "SetDefault",
        lambda manager, request: manager.registry.set_weights(request.model, {request.version: 1}),
        undo="",
        done="requests for {model} go to {version}",
        version="",
        command=Command("default", "Send all requests without a version to one version.", "--model movies --version 8"),
    ),
    Verb(
        "SetWeights",
        lambda manager, request: manager.registry.set_weights(
            request.model, {item.version: item.weight for item in request.weights}
        ),
        undo="",
        subject=lambda request: ", ".join(f"{item.version}={item.weight}" for item in request.weights),
        done="weights of {model} set",
        command=Command(
            "weights",
            "Split requests without a version between several versions, for example for a canary.",
            "--model movies --weight 7=90 --weight 8=10",
        ),
    ),
    Verb(
        "SetLabels",
        lambda manager, request: manager.registry.set_labels(
            request.model, {item.label: item.version for item in request.labels}
        ),
        undo="",
        subject=lambda request: ", ".join(f"{item.label}={item.version}" for item in request.labels),
        done="labels of {model} set",
        command=Command(
            "labels",
            "Set the labels of a model's versions, such as stable and canary; a request may name a label instead of a "
            "version.",
            "--model movies --label stable=7 --label canary=8",
        ),
    ),
    Verb(
        "Rollback",
        lambda manager, request: manager.registry.rollback(request.model),
        undo="",
        subject=lambda request: "",
        done="rolled {model} back",
        command=Command(
            "rollback",
            "Restore the traffic shares from before the last load --activate, default or weights.",
            '--model movies --reason "clicks fell"',
        ),
    ),
    Verb(
        "ApplyDelta",
        lambda manager, request: manager.apply_delta(request.model, request.version, request.delta),
        undo="UndoDelta",
        subject=lambda request: f"{request.version} delta {request.delta}".strip(),
        done="applied {delta} to {model} {version}",
        version="(the default version)",
        command=Command(
            "delta",
            "Apply a delta from the model store to a served version, or undo the last one.",
            "--model movies --version 8 --delta monday.rqd",
        ),
    ),
    Verb(
        "UndoDelta",
        lambda manager, request: manager.undo_delta(request.model, request.version),
        done="undid the last delta of {model} {version}",
        version="(the default version)",
    ),
)
VERBS = {verb.name: verb for verb in _VERBS}
"""By the name of the method."""
