"""Writes the pages of docs/reference/ that come from the code: commands, gRPC API, formats, metrics, environment, errors.

Run ``python tools/docs_reference.py`` from the repository root; ``make docs`` does. The pages are not committed.
"""

from __future__ import annotations

import html
import inspect
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORMATS = ROOT / "recinfer/archive"
PROTOS = ("recinfer/v1/inference.proto", "recinfer/v1/admin.proto", "recinfer/v1/shards.proto")
LINKS = {"FORMAT.md": "archive-format.md", "DELTA.md": "delta-format.md"}


def command_line() -> str:
    """Every command with its arguments and options, as typer writes them."""
    import typer
    from typer.cli import get_docs_for_click

    from recinfer.cli.main import app

    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="recinfer", title="Command line")
    text = re.sub(
        r"^\*\*Commands\*\*:\n\n(?:\* .*\n)+", "", text, flags=re.MULTILINE
    )  # cut short by typer; the table of contents has them
    text = re.sub(r"^\* `--(?:install|show)-completion`.*\n", "", html.unescape(text), flags=re.MULTILINE)
    parts = text.replace("[default: x", "[x").split("`")  # every other one is code
    return "`".join(part if at % 2 else part.replace("<", r"\<") for at, part in enumerate(parts))


def grpc_api() -> str:
    """Services, calls, messages and fields with the comments of the .proto files."""
    import grpc_tools
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from grpc_tools import protoc

    include = Path(grpc_tools.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        sources = [str(ROOT / "proto" / name) for name in PROTOS]
        arguments = [f"-I{ROOT / 'proto'}", f"-I{include}", "--include_source_info", f"--descriptor_set_out={out}"]
        if protoc.main(["protoc", *arguments, *sources]):
            raise SystemExit("protoc failed; its message is above")
        files = FileDescriptorSet.FromString(out.read_bytes()).file
    parts = [
        "# gRPC API\n\nThe gRPC port of a server serves `Inference`, the Open Inference Protocol (KServe v2), health and reflection, "
        "and with `--admin` also `Admin`. A shard server serves `Shards`. The files are in `proto/`.\n"
    ]
    for file in files:
        parts += _file_of(file)
    return "\n".join(parts)


def _file_of(file: object) -> Iterator[str]:
    """The Markdown of one FileDescriptorProto."""
    comments = {tuple(at.path): at for at in file.source_code_info.location}  # type: ignore[attr-defined]

    def said(*path: int) -> str:
        found = comments.get(path)
        return " ".join(found.leading_comments.split()) if found and found.leading_comments else ""

    head = comments[(12,)].leading_detached_comments  # of the line `syntax`
    name = file.name  # type: ignore[attr-defined]
    yield f"## {Path(name).stem.capitalize()}\n\n`proto/{name}`. " + " ".join(" ".join(head).split()) + "\n"
    for number, service in enumerate(file.service):  # type: ignore[attr-defined]
        yield f"### Service {service.name}\n\n{said(6, number)}\n\n| call | request | response | |\n|---|---|---|---|"
        for at, call in enumerate(service.method):
            ends = (kind.rpartition(".")[2] for kind in (call.input_type, call.output_type))
            takes, gives = (f"[{kind}](#{kind.lower()})" for kind in ends)
            yield f"| `{call.name}` | {takes} | {gives} | {_cell(said(6, number, 2, at))} |"
        yield ""
    for number, message in enumerate(file.message_type):  # type: ignore[attr-defined]
        yield f"### {message.name}\n\n{said(4, number)}\n"
        if message.field:
            yield "| field | type | number | |\n|---|---|---|---|"
        for at, field in enumerate(message.field):
            kind = field.type_name.rpartition(".")[2] or field.Type.Name(field.type).removeprefix("TYPE_").lower()
            kind = f"[{kind}](#{kind.lower()})" if field.type_name else kind
            repeated = "repeated " if field.label == field.LABEL_REPEATED else ""
            yield f"| `{field.name}` | {repeated}{kind} | {field.number} | {_cell(said(4, number, 2, at))} |"
        yield ""


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("<", r"\<")


def format_of(name: str) -> Callable[[], str]:
    """A page that is a Markdown file of recinfer/archive/, with its links changed."""

    def page() -> str:
        text = (FORMATS / name).read_text()
        for old, new in LINKS.items():
            text = text.replace(f"]({old}", f"]({new}")
        return text

    return page


def metrics() -> str:
    """Every metric family that a server, a ranker or a shard server exports."""
    source = (ROOT / "recinfer/serving/server/telemetry/prometheus.py").read_text()
    made = r'(Gauge|Counter|Histogram)?(?:MetricFamily|_histograms)\(\s*"(recinfer_\w+)",\s*"([^"]+)"'
    rows = [(kind or "Histogram", name, said) for kind, name, said in re.findall(made, source)]
    from recinfer.inference.id_steps import COUNTS

    rows += sorted({("Counter", count.metric, count.help) for count in COUNTS.values()})
    lines = [
        "# Metrics\n",
        "`recinfer serve --metrics-port PORT` serves these metrics at `/metrics` in Prometheus' text format, and as JSON at `/status.json`. "
        "[Monitor a server](../how-to/monitor.md) shows how to read them. Only rankers have `recinfer_shard_calls_total`, "
        "`recinfer_shard_up`, `recinfer_shard_outstanding` and `recinfer_default_rows_total`; only shard servers have "
        "`recinfer_shard_busy`, `recinfer_shard_running`, `recinfer_shard_refused_total` and `recinfer_shard_mapped_bytes`. "
        "The labels `model` and `version` of the metrics of requests are empty where a request names nothing served, and on "
        "shard servers.\n",
        "| metric | type | |",
        "|---|---|---|",
    ]
    for kind, name, said in sorted(rows, key=lambda row: row[1]):
        lines.append(f"| `{name}{'_total' if kind == 'Counter' else ''}` | {kind.lower()} | {said} |")
    return "\n".join(lines) + "\n"


def environment() -> str:
    """The variables that recinfer/env.py documents."""
    from recinfer import env

    said = inspect.cleandoc(env.__doc__ or "")
    rows = re.findall(r"^([A-Z_]+(?:, [A-Z_]+)*):?\s+(\S.*(?:\n +\S.*)*)", said, flags=re.MULTILINE)
    table = "\n".join(f"| `{name}` | {' '.join(text.split())} |" for name, text in rows)
    return f"# Environment variables\n\nrecinfer reads these variables and no others.\n\n| variable | |\n|---|---|\n{table}\n"


def errors() -> str:
    """The tree of errors, and the codes by which servers answer them."""
    from recinfer import errors as tree
    from recinfer.serving.wire.status import _TABLE

    lines = [
        "# Errors and exit codes\n",
        "Every error that recinfer raises on purpose is a subclass of `recinfer.errors.RecinferError`. A message says what came, what "
        "was expected and what to do. The message of an `ArchiveError` begins with the rule that is broken, for example `[C2]`: "
        "[Archive format](archive-format.md) lists the rules F1 to C2, [Delta format](delta-format.md) X1 to X8.\n",
        "| error | is a | meaning | gRPC | HTTP |",
        "|---|---|---|---|---|",
    ]
    for name in tree.__all__:
        kind = getattr(tree, name)
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
        code, http = next(((code, str(http)) for known, code, http in _TABLE if issubclass(kind, known)), ("", ""))
        said = " ".join((kind.__doc__ or "").split("\n\n")[0].split()).replace("``", "`")
        lines.append(f"| `{name}` | {bases} | {said} | {code} | {http} |")
    lines.append(
        "\nA [shard server](../explanation/shards-and-rankers.md) returns `FAILED_PRECONDITION` for a version that it has not mapped. "
        "`UNAVAILABLE`, `DEADLINE_EXCEEDED` and `RESOURCE_EXHAUSTED` may succeed later; clients retry the first and the last "
        "within the caller's timeout.\n\n"
        "## Exit codes\n\n| code | meaning |\n|---|---|\n| 0 | The command succeeded. |\n"
        "| 1 | A check failed: `verify`, `compare`, `migrate`, `export --reference`, `export --max-auc-drop`, `size`, `bench capacity`. |\n"
        '| 2 | The command failed; with `--json` the object is `{"error": ...}`. |\n'
        "| 3 | `compare`: the rows agree, but the tolerance of the archive's precision is too wide to prove anything. |\n"
        "| 130 | Ctrl-C |\n\n"
        "`recinfer --debug VERB` or `RECINFER_DEBUG=1` shows tracebacks.\n"
    )
    return "\n".join(lines)


PAGES: dict[str, Callable[[], str]] = {
    "command-line.md": command_line,
    "grpc.md": grpc_api,
    "archive-format.md": format_of("FORMAT.md"),
    "delta-format.md": format_of("DELTA.md"),
    "metrics.md": metrics,
    "environment.md": environment,
    "errors.md": errors,
}
"""File name in docs/reference/ -> what writes it."""


def write(folder: Path) -> None:
    """Writes all generated pages into ``folder``; a page that did not change keeps its time."""
    for name, make in PAGES.items():
        text = make()
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    write(ROOT / "docs/reference")
