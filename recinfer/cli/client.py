"""The options of verbs that call a running server, and the client that they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recinfer.errors import ConfigError

if TYPE_CHECKING:
    from recinfer.serving.client.client import InferenceClient

__all__ = ["ClientOptions", "ServerOptions", "TargetOption", "client_arguments", "missing_text", "open_client"]

TargetOption = Annotated[str, typer.Option("--target", metavar="HOST:PORT", help="A running `recinfer serve`.")]


@dataclass(frozen=True)
class ServerOptions:
    """What is asked of the server, for how long, and how it is trusted."""

    model: Annotated[str, typer.Option("--model", help="Served model; empty is the server's default.")] = ""
    version: Annotated[str, typer.Option("--version", help="Its version; empty is the default one.")] = ""
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to wait for each answer.")] = 10.0
    wait: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for the server to come up first.")] = 0.0
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", help="File with the server's bearer token; else RECINFER_TOKEN.", show_default=False
        ),
    ] = None
    tls_ca: Annotated[
        Path | None,
        typer.Option("--tls-ca", help="PEM file of the authority of the server's certificate.", show_default=False),
    ] = None
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", help="PEM file of your certificate (mutual TLS).", show_default=False)
    ] = None
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="PEM file of its key.", show_default=False)] = None
    tls_name: Annotated[
        str,
        typer.Option("--tls-name", help="Name in the server's certificate, if not the target's.", show_default=False),
    ] = ""


@dataclass(frozen=True)
class ClientOptions(ServerOptions):
    """The same for verbs that send requests to a model; to ``recinfer admin labels`` the word ``--label`` means something else."""

    label: Annotated[
        str,
        typer.Option("--label", help="A label of the model, such as canary, instead of --version.", show_default=False),
    ] = ""


def client_arguments(options: ServerOptions) -> dict[str, Any]:
    """What InferenceClient and AsyncInferenceClient take of them; raises ConfigError naming a file that cannot be read."""
    from recinfer import env
    from recinfer.serving.wire.tls import read_token

    for path in (options.tls_ca, options.tls_cert, options.tls_key):
        if path is not None and not path.is_file():
            raise ConfigError(f"cannot read {path}: no such file")
    return {
        "model": options.model,
        "version": options.version,
        "label": options.label if isinstance(options, ClientOptions) else "",
        "timeout": options.timeout,
        "token": (env.token() or "") if options.token_file is None else read_token(options.token_file),
        "tls_ca": options.tls_ca,
        "tls_cert": options.tls_cert,
        "tls_key": options.tls_key,
        "tls_name": options.tls_name,
    }


def open_client(target: str, options: ServerOptions) -> InferenceClient:
    """A client of ``target``, once it takes requests where ``wait`` is above 0.

    Raises:
        ConfigError: naming a file that cannot be read.
        InputError: a target that is none.
        UnavailableError: it takes none after ``wait`` seconds.
    """
    from recinfer.serving.client.client import InferenceClient

    client = InferenceClient(target, tensors=False, **client_arguments(options))  # torch is not imported for it
    if options.wait:
        try:
            client.wait_until_ready(options.wait)
        except BaseException:  # also Ctrl-C
            client.close()
            raise
    return client


def missing_text(ranks: Sequence[int]) -> str:
    """What to say above an answer that lacks ``ranks``, in rich's markup."""
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return f"[yellow]{which} did not answer: vectors of their rows are zero, as the model allows[/yellow]"
