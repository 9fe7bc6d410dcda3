"""``recinfer admin``: changes and lists the models that a running server serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from recinfer.cli.client import ServerOptions, TargetOption, client_arguments
from recinfer.cli.console import EXIT_FAILED_CHECK, JsonOption, Output, styled, verb
from recinfer.cli.declared import takes
from recinfer.cli.options import parse_pair
from recinfer.errors import ConfigError
from recinfer.sizes import size_text

if TYPE_CHECKING:
    from recinfer.serving.client.admin import AdminClient, Loaded

__all__ = ["EXAMPLE", "NAME", "app"]

NAME = "admin"
EXAMPLE = "Example: recinfer admin list --target 127.0.0.1:8500"

app = typer.Typer(
    help="List and change the models that a running `recinfer serve --model-store DIR --admin` serves.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_AT = "--target 127.0.0.1:8500"
_WHAT = "--model movies --version 8"


@dataclass(frozen=True)
class AdminClientOptions(ServerOptions):
    """The options of other commands that call a server, with a longer timeout: loading checks a whole archive."""

    timeout: Annotated[float, typer.Option(min=0.001, help="Timeout of the call, in seconds.")] = 300.0


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """The options of every ``recinfer admin`` command."""

    target: TargetOption
    client: AdminClientOptions
    as_json: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class ChangeOptions(ListOptions):
    """The options of every command that changes something."""

    reason: Annotated[str, typer.Option("--reason", help="Reason for the change, written to the server's log.")] = ""


@dataclass(frozen=True, kw_only=True)
class LoadOptions(ChangeOptions):
    """The options of ``load``."""

    activate: Annotated[bool, typer.Option("--activate", help="Also make this version the default.")] = False


@dataclass(frozen=True, kw_only=True)
class WeightsOptions(ChangeOptions):
    """The options of ``weights``."""

    weight: Annotated[
        list[str],
        typer.Option("--weight", metavar="VERSION=SHARE", help="Share of the traffic, as a whole number; repeatable."),
    ]


@dataclass(frozen=True, kw_only=True)
class LabelsOptions(ChangeOptions):
    """The options of ``labels``."""

    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            metavar="LABEL=VERSION",
            help="Label of a version; repeatable. Without this option all labels are removed.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DeltaOptions(ChangeOptions):
    """The options of ``delta``."""

    delta: Annotated[
        str | None,
        typer.Option("--delta", metavar="FILE", help="Name of a delta (.rqd) in the model's folder of the store."),
    ] = None
    undo: Annotated[bool, typer.Option("--undo", help="Undo the version's last delta instead.")] = False


@takes(LoadOptions)
def load(options: LoadOptions) -> None:
    """Load a version from the model store, check it and warm it up. Without --version: the newest. Succeeds if already
    loaded."""
    name, version = _model(options), options.client.version
    _change(
        options,
        lambda admin: admin.load(name, version, activate=options.activate, reason=options.reason),
        f"loaded {name} {version or '(the newest)'}",
    )


@takes(ChangeOptions)
def unload(options: ChangeOptions) -> None:
    """Stop serving a version. Requests already running on it complete."""
    name, version = _model(options), _version(options)
    _change(options, lambda admin: admin.unload(name, version, reason=options.reason), f"unloaded {name} {version}")


@takes(ChangeOptions)
def default(options: ChangeOptions) -> None:
    """Send all requests without a version to one version."""
    name, version = _model(options), _version(options)
    _change(
        options,
        lambda admin: admin.set_default(name, version, reason=options.reason),
        f"requests for {name} go to {version}",
    )


@takes(WeightsOptions)
def weights(options: WeightsOptions) -> None:
    """Split requests without a version between several versions, for example for a canary."""
    name = _model(options)
    pairs = [parse_pair(text, "--weight", "VERSION=SHARE, as in 8=10") for text in options.weight]
    odd = [share for _, share in pairs if not share.isdecimal()]
    if odd:
        raise ConfigError(f"--weight: got the share {odd[0]!r}, expected a whole number of 0 or more")
    shares = {version: int(share) for version, share in pairs}
    _change(options, lambda admin: admin.set_weights(name, shares, reason=options.reason), f"weights of {name} set")


@takes(LabelsOptions)
def labels(options: LabelsOptions) -> None:
    """Set the labels of a model's versions, such as stable and canary; a request may name a label instead of a
    version."""
    name = _model(options)
    expected = "LABEL=VERSION, as in stable=7"
    named = dict(parse_pair(text, "--label", expected, at_first=True) for text in options.label or ())
    _change(options, lambda admin: admin.set_labels(name, named, reason=options.reason), f"labels of {name} set")


@takes(ChangeOptions)
def rollback(options: ChangeOptions) -> None:
    """Restore the traffic shares from before the last load --activate, default or weights."""
    name = _model(options)
    _change(options, lambda admin: admin.rollback(name, reason=options.reason), f"rolled {name} back")


@takes(DeltaOptions)
def delta(options: DeltaOptions) -> None:
    """Apply a delta from the model store to a served version, or undo the last one."""
    name, version, file = _model(options), options.client.version, options.delta
    if (file is None) == (not options.undo):
        raise ConfigError("delta: give either --delta FILE or --undo")
    if file is not None:
        _change(
            options,
            lambda admin: admin.apply_delta(name, file, version, reason=options.reason),
            f"applied {file} to {name} {version or '(the default version)'}",
        )
    else:
        _change(
            options,
            lambda admin: admin.undo_delta(name, version, reason=options.reason),
            f"undid the last delta of {name} {version or '(the default version)'}",
        )


@takes(ListOptions)
def list_models(options: ListOptions) -> None:
    """List models and versions with state, traffic share, labels, load time, engine and memory.

    Memory is the archive's size. Archives are memory-mapped, so the processes of one host share these pages.
    """
    output = Output(options.as_json)
    with _open(options) as admin:
        found = _only(admin.list_models(), options)
    output.show(_table(found))
    output.finish(_plain(options.target, found))


@takes(ListOptions)
def status(options: ListOptions) -> None:
    """Show whether a server or shard server is ready and, if it runs with --admin, its models.

    Exit code 1: the server is not ready.
    """
    from recinfer.errors import RecinferError

    output = Output(options.as_json)
    health, found, why = _health(options), None, ""
    if health == "SERVING":
        try:
            with _open(options) as admin:
                found = _only(admin.list_models(), options)
        except RecinferError as error:
            why = str(error)
    colour = "green" if health == "SERVING" else "red"
    output.show(Text.assemble(f"{options.target} is ", (health, colour)))
    if found is not None:
        output.show(_table(found))
    elif why:
        output.note(f"cannot list its models: {why}")
    output.finish({"health": health, **_plain(options.target, found or {})})
    if health != "SERVING":
        raise typer.Exit(EXIT_FAILED_CHECK)


def _change(options: ChangeOptions, make: Callable[[AdminClient], Loaded], done: str) -> None:
    output = Output(options.as_json)
    with _open(options) as admin:
        found = make(admin)
    output.show(styled("green", done), _table(found))
    output.finish(_plain(options.target, found))


def _open(options: ListOptions) -> AdminClient:
    from recinfer.serving.client.admin import AdminClient

    arguments = client_arguments(replace(options.client, model="", version=""))
    taken = {name: value for name, value in arguments.items() if name not in ("model", "version", "label")}
    if options.client.wait:
        from recinfer.cli.client import open_client

        open_client(options.target, replace(options.client, model="", version="")).close()
    return AdminClient(options.target, **taken)


def _health(options: ListOptions) -> str:
    """The status that the health service reports, or UNREACHABLE."""
    import grpc

    from recinfer.serving.client.client import HEALTH_CHECK, IS_SERVING

    with _open(options) as admin:
        check = admin.channel.unary_unary(HEALTH_CHECK)
        try:
            answer = check(b"", timeout=min(options.client.timeout, 10.0))
        except grpc.RpcError:
            return "UNREACHABLE"
    return "SERVING" if answer == IS_SERVING else "NOT_SERVING"


def _model(options: ListOptions) -> str:
    if not options.client.model:
        raise ConfigError("--model: got none, expected a model's name; `recinfer admin list` lists them")
    return options.client.model


def _version(options: ListOptions) -> str:
    if not options.client.version:
        raise ConfigError("--version: got none, expected a version; `recinfer admin list` lists them")
    return options.client.version


def _only(found: Loaded, options: ListOptions) -> Loaded:
    """The models and versions that --model and --version select."""
    name, version = options.client.model, options.client.version
    return {
        model: {v: one for v, one in versions.items() if version in ("", v)}
        for model, versions in found.items()
        if name in ("", model)
    }


def _table(found: Loaded) -> Table:
    table = Table("model", "version", "state", "share", "labels", "since", "engine", "memory", "deltas")
    for column in (3, 7, 8):
        table.columns[column].justify = "right"
    for number, (model, versions) in enumerate(found.items()):
        total = sum(one.weight for one in versions.values()) or 1
        for version, one in versions.items():
            shown = f"{model} (default)" if number == 0 else model
            state = styled("green", "serving") if one.weight else "by name only"
            table.add_row(
                shown,
                version,
                state,
                f"{100 * one.weight / total:.3g} %",
                ", ".join(one.labels),
                _since(one.age_seconds).strftime("%Y-%m-%d %H:%M:%S"),
                one.engine or "lookups only",
                size_text(one.bytes),
                str(one.deltas),
            )
    return table


def _since(age_seconds: float) -> datetime:
    return (datetime.now(UTC) - timedelta(seconds=age_seconds)).astimezone()


def _plain(target: str, found: Loaded) -> dict[str, Any]:
    """The JSON output: a list of models in the server's order, the default model first."""
    models = [
        {
            "model": model,
            "versions": [
                {
                    "version": version,
                    "state": "serving" if one.weight else "by_name_only",
                    "since": _since(one.age_seconds).isoformat(timespec="seconds"),
                    **asdict(one),
                }
                for version, one in versions.items()
            ],
        }
        for model, versions in found.items()
    ]
    return {"target": target, "models": models}


for _name, _run, _example in (
    ("load", load, f'load {_AT} {_WHAT} --activate --reason "release 8"'),
    ("unload", unload, f"unload {_AT} --model movies --version 7"),
    ("default", default, f"default {_AT} {_WHAT}"),
    ("weights", weights, f"weights {_AT} --model movies --weight 7=90 --weight 8=10"),
    ("labels", labels, f"labels {_AT} --model movies --label stable=7 --label canary=8"),
    ("rollback", rollback, f'rollback {_AT} --model movies --reason "clicks fell"'),
    ("delta", delta, f"delta {_AT} {_WHAT} --delta monday.rqd"),
    ("list", list_models, f"list {_AT} --json | tail -1"),
    ("status", status, f"status {_AT}"),
):
    app.command(name=_name, epilog=f"Example: recinfer admin {_example}")(verb(_run))
