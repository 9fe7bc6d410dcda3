"""The output of every command: text, the ``--json`` line, progress, and errors with their exit codes."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.text import Text

import recinfer
from recinfer import env
from recinfer.cli.interrupts import cleaning_up_at_signals
from recinfer.errors import MismatchError, RecinferError
from recinfer.files import refuse_url

__all__ = [
    "EXIT_ERROR",
    "EXIT_FAILED_CHECK",
    "EXIT_INTERRUPTED",
    "EXIT_PROVES_LITTLE",
    "JsonOption",
    "Output",
    "debugging",
    "set_debug",
    "styled",
    "verb",
    "where_rules_are",
]

EXIT_FAILED_CHECK = 1  # the command ran, and its check failed
EXIT_ERROR = 2  # the command could not run
EXIT_PROVES_LITTLE = 3  # the command ran, and its check could not have failed
EXIT_INTERRUPTED = 130  # Ctrl-C, as shells report it

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]

_PLAIN_WIDTH = 140  # columns when the output is a file or a pipe, which have no width of their own
_LEAST_WIDTH = 80  # all tables fit; a narrower terminal breaks their lines, and rich would cut off their numbers

# Module -> the name of the extra that installs it.
_RUNTIME = "cpu]' or 'recinfer[cuda"
_EXTRA_OF_MODULE = {
    "torch": _RUNTIME,
    "fbgemm_gpu": _RUNTIME,
    "onnxruntime": _RUNTIME,
    "safetensors": _RUNTIME,
    "grpc_health": _RUNTIME,
    "grpc_reflection": _RUNTIME,
    "onnx": "onnx",
    "onnxscript": "onnx",
    "matplotlib": "plot",
    "torchserve": "torchserve",
    "ts": "torchserve",
    "aiohttp": "serve",
    "prometheus_client": "serve",
    "torchmetrics": "train",
    "pyarrow": "arrow",
    "ray": "ray",
    "fsspec": "remote",
}

_debug = False
_log = logging.getLogger(__name__)


def styled(style: str, first: str, rest: str = "") -> Text:
    """``first`` in a style of rich, and ``rest`` in none."""
    return Text.assemble((first, style), rest)


def set_debug(on: bool) -> None:
    """Show tracebacks of expected errors too, for the rest of the process (``recinfer --debug``)."""
    global _debug
    _debug = _debug or on


def debugging() -> bool:
    """Whether ``--debug`` was given."""
    return _debug


class Output:
    """The output of one command: its result goes to stdout and its progress to stderr.

    With ``as_json``, text for people goes to stderr, so that stdout holds only the JSON object. With ``logs``, lines on
    stderr are records of the package's log, in the log's format. Without ``must_write``, text for people that cannot be
    written, as on a full disk, is left out: a server's requests do not wait for room in its log.
    """

    def __init__(self, as_json: bool, *, logs: bool = False, must_write: bool = True) -> None:
        self.as_json = as_json
        self.logs = logs
        self._must_write = must_write
        self.progress = _console(sys.stderr)
        self.result = _console(sys.stderr if as_json else sys.stdout, at_least=_LEAST_WIDTH)

    def show(self, *renderables: RenderableType) -> None:
        """Print tables, panels or text for people."""
        for renderable in renderables:
            if self.logs and self.as_json and isinstance(renderable, str | Text):
                _log.info("%s", renderable)
                continue
            with self._writing():
                self.result.print(renderable)

    def note(self, text: str) -> None:
        """Print a line of progress to stderr."""
        if self.logs:
            _log.info("%s", text)
            return
        with self._writing():
            self.progress.print(text, style="dim", highlight=False, soft_wrap=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError:
            if self._must_write:
                raise

    @contextmanager
    def bar(self, what: str, *, lines: bool = False) -> Iterator[Callable[[str, int, int], None]]:
        """A progress bar on stderr, removed at the end; yields a function that sets its text, progress and total.

        Args:
            what: the text at the start.
            lines: if stderr is not a terminal, print each text once as a line instead.
        """
        from rich import progress

        text = progress.TextColumn("{task.description}", markup=False)
        columns = (text, progress.BarColumn(), progress.TimeElapsedColumn())
        with progress.Progress(*columns, console=self.progress, transient=True) as shown:
            task, last = shown.add_task(what, total=1), ""

            def update(what: str, done: int, total: int) -> None:
                nonlocal last
                shown.update(task, description=what, completed=done, total=total)
                if lines and not self.progress.is_terminal and what != last:
                    self.note(what)
                    last = what

            yield update

    def finish(self, payload: dict[str, Any]) -> None:
        """With ``--json``, print ``payload`` as the last line of stdout."""
        if self.as_json:
            print(json.dumps(_finite(payload), default=str, allow_nan=False), flush=True)


def verb(function: Callable[..., None], *, handles_signals: bool = False) -> Callable[..., None]:
    """Wrap a command: an expected error becomes one red line on stderr and exit code 2 (1 for a MismatchError), Ctrl-C exit
    code 130. SIGTERM and SIGHUP end the process once the command has removed its temporary files and stopped its servers.

    With ``--log-json`` the error is a log record. With ``--json`` it is also printed as ``{"error": {"type",
    "message"}}``, so that a caller always gets an object. An unexpected error, that is a bug, keeps its traceback;
    ``--debug`` and ``RECINFER_DEBUG=1`` show one for expected errors too.

    A URL given as a path of this machine is an error, whether the command would read or write the path.

    Args:
        handles_signals: the command handles SIGTERM and SIGHUP itself.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            for name, value in kwargs.items():
                for path in value if isinstance(value, list) else [value]:
                    if isinstance(path, Path):
                        refuse_url(path, name)
            with nullcontext() if handles_signals else cleaning_up_at_signals():
                function(*args, **kwargs)
        except KeyboardInterrupt:
            # CPython stores a KeyboardInterrupt that left code compiled from text (dataclasses, while torch loads) and
            # would end `python -m` by SIGINT in spite of the exit code; running other such code clears the stored one.
            exec("")
            _console(sys.stderr).print("interrupted", style="yellow")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            raise  # `recinfer inspect ... | head`: typer ends quietly
        except (RecinferError, OSError, ModuleNotFoundError) as error:
            message = _explain(error)
            if message is None or _debug or env.debug():
                raise
            as_json, log_json = (bool(kwargs.get(name)) for name in ("as_json", "log_json"))
            _fail(error, message, as_json=as_json, log_json=log_json)

    # typer would keep the line breaks of the source in the paragraphs after the first
    run.__doc__ = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(function) or "")
    return run


def _fail(error: Exception, message: str, *, as_json: bool, log_json: bool) -> NoReturn:
    if log_json:
        from recinfer.serving.server.telemetry.observe import log_as_json

        log_as_json()  # the command may have failed before its own call of log_as_json
        _log.error("%s", message)
    else:
        text = Text.assemble(("error:", "bold red"), (f" {message}", "red"))
        _console(sys.stderr).print(text, highlight=False, soft_wrap=True)
    if as_json:
        payload: dict[str, Any] = {"error": {"type": type(error).__name__, "message": message}}
        if isinstance(error, MismatchError):
            payload["reference"] = _finite(error.comparison.to_dict())
        print(json.dumps(payload), flush=True)
    raise typer.Exit(EXIT_FAILED_CHECK if isinstance(error, MismatchError) else EXIT_ERROR) from None


def _explain(error: Exception) -> str | None:
    """The message of an expected error; None for an unexpected one, which needs a traceback."""
    if isinstance(error, ModuleNotFoundError):
        extra = _EXTRA_OF_MODULE.get((error.name or "").partition(".")[0])
        return extra and f"this needs the package {error.name!r}; install it with: pip install 'recinfer[{extra}]'"
    if isinstance(error, OSError) and not isinstance(error, RecinferError):
        if isinstance(error, FileExistsError) and error.filename:  # from mkdir
            return f"{error.filename} exists and is not a folder; choose another path"
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror or error}{where}"
    message = " ".join(str(error).split())
    where = where_rules_are(message)
    # The message of a server that this command started has it already.
    return f"{message} ({where})" if where and where not in message else message


def where_rules_are(message: str) -> str:
    """A pointer to the format specification for rules that a message names, as in [C2]; empty if it names none."""
    rules = list(dict.fromkeys(re.findall(r"\[([FJMPSDCVX]\d+)\]", message)))
    files = list(dict.fromkeys("DELTA.md" if rule.startswith("X") else "FORMAT.md" for rule in rules))
    folder = Path(recinfer.__file__).parent / "archive"
    paths = " and ".join(str(folder / file) for file in files)
    return f"rule{'s' if len(rules) > 1 else ''} {', '.join(rules)}: see {paths}" if rules else ""


def _finite(value: Any) -> Any:
    """``value`` with null in place of nan and infinity, which JSON lacks."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _console(stream: Any, at_least: int = 0) -> Console:
    plain = not stream.isatty()
    # Names of models, tables and files are printed as they are, also those that look like rich's markup or emoji codes.
    width = _PLAIN_WIDTH if plain else None
    console = Console(file=stream, width=width, soft_wrap=False, markup=False, emoji=False)
    if console.width < at_least:
        console.width = at_least
    return console
