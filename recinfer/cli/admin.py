"""``recinfer admin``: changes and lists the models that a running server serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, make_dataclass, replace
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
from recinfer.printed import slim_table
from recinfer.serving.wire.admin_verbs import VERBS, Command
from recinfer.sizes import size_text

if TYPE_CHECKING:
    from recinfer.serving.client.admin import AdminClient, Loaded, ShardReplica

__all__ = ["EXAMPLE", "NAME", "app"]

NAME = "admin"
EXAMPLE = "Example: recinfer admin list --target 127.0.0.1:8500"

app = typer.Typer(
    help="List and change the models that a running `recinfer serve --model-store DIR --admin` serves.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_AT = "--target 127.0.0.1:8500"


@dataclass(frozen=True)
class AdminClientOptions(ServerOptions):
    """The options of other commands that call a server, with a longer timeout: loading checks a whole archive."""

    model: Annotated[
        str,
        typer.Option("--model", help="Name of a model. Changes need it; without it list and status show all models."),
    ] = ""
    version: Annotated[
        str,
        typer.Option(
            "--version", help="Version of the model. Default: of load the newest, of delta the default version."
        ),
    ] = ""
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


_Change = tuple[str, dict[str, Any]]
"""A verb, and fields of its request besides the model, the version and the reason."""


def weights(options: WeightsOptions) -> _Change:
    """The shares of ``--weight``."""
    pairs = [parse_pair(text, "--weight", "VERSION=SHARE, as in 8=10") for text in options.weight]
    odd = [share for _, share in pairs if not share.isdecimal()]
    if odd:
        raise ConfigError(f"--weight: got the share {odd[0]!r}, expected a whole number of 0 or more")
    return "SetWeights", {"weights": {version: int(share) for version, share in pairs}}


def labels(options: LabelsOptions) -> _Change:
    """The labels of ``--label``."""
    expected = "LABEL=VERSION, as in stable=7"
    named = dict(parse_pair(text, "--label", expected, at_first=True) for text in options.label or ())
    return "SetLabels", {"labels": named}


def delta(options: DeltaOptions) -> _Change:
    """The delta of ``--delta``, or the verb of ``--undo``."""
    if (options.delta is None) == (not options.undo):
        raise ConfigError("delta: give either --delta FILE or --undo")
    return ("UndoDelta", {}) if options.undo else ("ApplyDelta", {"delta": options.delta})


@dataclass(frozen=True, kw_only=True)
class WatchOptions(ListOptions):
    """The options of ``list``."""

    watch: Annotated[
        float | None,
        typer.Option(
            "--watch",
            min=0.1,
            metavar="SECONDS",
            help="Show the list again every so many seconds, until Ctrl-C.",
            show_default=False,
        ),
    ] = None


@takes(WatchOptions)
def list_models(options: WatchOptions) -> None:
    """List models and versions with state, traffic share, labels, load time, engine and memory; of a ranker also its shard servers.

    Memory is the archive's size. Archives are memory-mapped, so the processes of one host share these pages.
    """
    output = Output(options.as_json)
    with _open(options) as admin:
        if options.watch is not None:
            _watch(output, admin, options, options.watch)
            return
        found, shards = _only(admin.list_models(), options), admin.list_shards()
    output.show(_table(found), *_shard_tables(shards))
    listed = {"shards": [replica._asdict() for replica in shards]} if shards else {}
    output.finish({**_plain(options.target, found), **listed})


def _watch(output: Output, admin: AdminClient, options: WatchOptions, seconds: float) -> None:
    """Show the list until Ctrl-C; a server that does not answer is shown as such, and asked again."""
    from rich.console import Group
    from rich.live import Live

    from recinfer.errors import RecinferError

    if options.as_json:
        raise ConfigError("got --watch and --json; --json prints one list: leave one of them out")
    with Live(console=output.result, auto_refresh=False, screen=output.result.is_terminal) as live:
        while True:
            try:
                shown = [_table(_only(admin.list_models(), options)), *_shard_tables(admin.list_shards())]
            except RecinferError as error:
                shown = [Text(str(error), "red")]
            at = datetime.now().astimezone().strftime("%H:%M:%S")
            live.update(
                Group(Text(f"{options.target} at {at}, every {seconds:g} s; Ctrl-C ends", "dim"), *shown), refresh=True
            )
            time.sleep(seconds)


def _shard_tables(shards: Sequence[ShardReplica]) -> list[Any]:
    """A table of a ranker's shard servers, and a red line for ranks without one; nothing for another server."""
    if not shards:
        return []
    numbers = ("under way", "default rows")
    table = slim_table("rank", "replica", "state", *numbers, "versions", numbers=numbers)
    for replica in shards:
        state = Text("up", "green") if replica.up else Text(f"down: {replica.why}" if replica.why else "down", "red")
        versions = " ".join(map(_short_key, replica.versions))
        numbers = f"{replica.outstanding:,}", f"{replica.default_rows:,}"
        table.add_row(str(replica.rank), replica.address, state, *numbers, versions)
    gone = sorted({r.rank for r in shards} - {r.rank for r in shards if r.up})
    alarm = [Text(f"no shard server answers for rank {', '.join(map(str, gone))}", "bold red")] if gone else []
    return [table, *alarm]


def _short_key(key: str) -> str:
    """The start of a version's key, and the number of its deltas, as the status page shows them.

    >>> _short_key("9bf5e7f34c925307a1b2"), _short_key("9bf5e7f34c925307a1b2+1:6f0c")
    ('9bf5e7f3', '9bf5e7f3+1')
    """
    base, plus, deltas = key.partition(":")[0].partition("+")
    return base[:8] + plus + deltas


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


def _change(options: ChangeOptions, fields: Callable[[Any], _Change]) -> None:
    model = _model(options)
    name, given = fields(options)
    entry = VERBS[name]
    given["model"] = model
    if entry.version is not None:
        given["version"] = options.client.version if entry.version else _version(options)
    output = Output(options.as_json)
    with _open(options) as admin:
        found = getattr(admin, entry.method)(**given, reason=options.reason)
    done = entry.done.format(**{**given, "version": given.get("version") or entry.version})
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
    headings = ("model", "version", "state", "share", "labels", "since", "engine", "memory", "deltas")
    table = slim_table(*headings, numbers=("share", "memory", "deltas"))
    one_model = len(found) == 1  # so that a version takes one line of 80 columns
    for whole in ("since", "engine") if one_model else ("engine",):
        table.columns[headings.index(whole)].no_wrap = True
    for number, (model, versions) in enumerate(found.items()):
        total = sum(one.weight for one in versions.values()) or 1
        for version, one in versions.items():
            shown = f"{model} (default)" if number == 0 and not one_model else model
            state = styled("green", "serving") if one.weight else "by name"
            table.add_row(
                shown,
                version,
                state,
                f"{100 * one.weight / total:.3g} %",
                ", ".join(one.labels),
                _since(one.age_seconds).strftime("%m-%d %H:%M:%S"),
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


# Verbs whose options are more than flags.
_OWN: dict[str, tuple[type[ChangeOptions], Callable[[Any], _Change]]] = {
    "SetWeights": (WeightsOptions, weights),
    "SetLabels": (LabelsOptions, labels),
    "ApplyDelta": (DeltaOptions, delta),
}


def _command_of(name: str, command: Command) -> Callable[..., None]:
    """The command of a verb, with the flags that the table has, or with options of its own."""

    def given(options: ChangeOptions) -> _Change:
        return name, {flag: getattr(options, flag) for flag in command.flags}

    flags = [
        (flag, Annotated[bool, typer.Option(f"--{flag}", help=text)], field(default=False))
        for flag, text in command.flags.items()
    ]
    with_flags = make_dataclass("FlagOptions", flags, bases=(ChangeOptions,), frozen=True, kw_only=True)
    kind, fields = _OWN.get(name, (with_flags, given))

    def run(options: ChangeOptions) -> None:
        _change(options, fields)

    run.__doc__ = command.help
    return takes(kind)(run)


_COMMANDS = [(entry.command, _command_of(name, entry.command)) for name, entry in VERBS.items() if entry.command]
for _name, _run, _example in (
    *((command.name, run, f"{command.name} {_AT} {command.example}") for command, run in _COMMANDS),
    ("list", list_models, f"list {_AT} --json | tail -1"),
    ("status", status, f"status {_AT}"),
):
    app.command(name=_name, epilog=f"Example: recinfer admin {_example}")(verb(_run))
