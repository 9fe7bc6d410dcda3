"""Options of commands that call a running server, and opening the client that they describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.text import Text

from recinfer.cli.console import styled
from recinfer.errors import ConfigError

if TYPE_CHECKING:
    from recinfer.serving.client.client import InferenceClient

__all__ = ["ClientOptions", "ServerOptions", "TargetOption", "client_arguments", "missing_text", "open_client"]

TargetOption = Annotated[
    str, typer.Option("--target", metavar="HOST:PORT", help="Address of a running `recinfer serve`.")
]


@dataclass(frozen=True)
class ServerOptions:
    """Model and version to call, timeouts, and how to authenticate."""

    PANEL: ClassVar[str] = "Server connection"

    model: Annotated[
        str, typer.Option("--model", help="Name of a served model. Default: the server's default model.")
    ] = ""
    version: Annotated[str, typer.Option("--version", help="Version of the model. Default: the server's choice.")] = ""
    timeout: Annotated[float, typer.Option(min=0.001, help="Timeout of each call, in seconds.")] = 10.0
    wait: Annotated[
        float, typer.Option("--wait", min=0, help="Wait up to this many seconds for the server to be ready.")
    ] = 0.0
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", help="File with the server's bearer token. Default: RECINFER_TOKEN.", show_default=False
        ),
    ] = None
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls-ca",
            help="PEM file of the certificate authority that signs the server's certificate.",
            show_default=False,
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option("--tls-cert", help="PEM file of the client certificate (mutual TLS).", show_default=False),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option("--tls-key", help="PEM file of the client certificate's private key.", show_default=False),
    ] = None
    tls_name: Annotated[
        str,
        typer.Option(
            "--tls-name", help="Host name in the server's certificate, if it differs from --target.", show_default=False
        ),
    ] = ""


@dataclass(frozen=True)
class ClientOptions(ServerOptions):
    """:class:`ServerOptions` and ``--label``, for commands that send requests to a model."""

    label: Annotated[
        str,
        typer.Option("--label", help="A label of the model, such as canary, instead of --version.", show_default=False),
    ] = ""


def client_arguments(options: ServerOptions) -> dict[str, Any]:
    """The keyword arguments of InferenceClient and AsyncInferenceClient; raises ConfigError naming a file that cannot
    be read."""
    from recinfer import env

    for path in (options.tls_ca, options.tls_cert, options.tls_key):
        if path is not None and not path.is_file():
            raise ConfigError(f"cannot read {path}: no such file")
    return {
        "model": options.model,
        "version": options.version,
        "label": options.label if isinstance(options, ClientOptions) else "",
        "timeout": options.timeout,
        "token": (env.token() or "") if options.token_file is None else "",
        "token_file": options.token_file,
        "tls_ca": options.tls_ca,
        "tls_cert": options.tls_cert,
        "tls_key": options.tls_key,
        "tls_name": options.tls_name,
    }


def open_client(target: str, options: ServerOptions) -> InferenceClient:
    """A client of ``target``. With ``wait`` above 0, waits that many seconds for the server to be ready.

    Raises:
        ConfigError: a file cannot be read; the message names it.
        InputError: the target is not an address.
        UnavailableError: the server is not ready after ``wait`` seconds.
    """
    from recinfer.serving.client.client import InferenceClient

    client = InferenceClient(target, tensors=False, **client_arguments(options))  # the client does not import torch
    if options.wait:
        try:
            client.wait_until_ready(options.wait)
        except BaseException:  # also Ctrl-C
            client.close()
            raise
    return client


def missing_text(ranks: Sequence[int]) -> Text:
    """The warning for a response that lacks the rows of ``ranks``."""
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return styled("yellow", f"{which} did not respond: their rows are replaced by zero vectors, as the archive allows")
