"""``recinfer predict``: scores rows with a running server."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from recinfer.cli.client import ClientOptions, TargetOption, missing_text, open_client
from recinfer.cli.console import EXIT_FAILED_CHECK, JsonOption, Output, styled
from recinfer.cli.declared import takes
from recinfer.cli.options import check_other_file, check_place
from recinfer.errors import ConfigError, InputError, RecinferError
from recinfer.files import NOT_GZIP, create_text, naming, packed, read_bytes, without_gz, write_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recinfer.columns import FeatureArrays
    from recinfer.input_arrays import InputArrays
    from recinfer.serving.client.client import InferenceClient

__all__ = ["EXAMPLE", "NAME", "InputFormat", "PredictOptions", "run"]

NAME = "predict"
EXAMPLE = "Example: recinfer predict --target 127.0.0.1:8500 --input rows.csv --out scores.csv"

_SHOWN = 10
_SHOWN_ERRORS = 3
_ALL_FAIL = 10_000  # rows after which a file without a valid row ends the command


class InputFormat(StrEnum):
    """Formats of ``--input``: raw rows, or ids and numbers as JSON."""

    csv = "csv"
    criteo = "criteo"
    movielens = "movielens"
    json = "json"


_BY_SUFFIX = {
    ".csv": InputFormat.csv,
    ".tsv": InputFormat.criteo,
    ".txt": InputFormat.criteo,
    ".inter": InputFormat.movielens,
    ".json": InputFormat.json,
}


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """The options of ``recinfer predict``."""

    target: TargetOption
    input: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help="File with raw rows in a format of the training data, or JSON with ids; also as .gz (see above).",
            show_default=False,
        ),
    ] = None
    rows: Annotated[
        Path | None,
        typer.Option(
            "--rows",
            help="File with any number of rows of ids: .csv, .jsonl or .parquet, text also as .gz (see above).",
            show_default=False,
        ),
    ] = None
    keep: Annotated[
        list[str] | None,
        typer.Option(
            "--keep", metavar="COLUMN", help="Column of --rows that is no input: copy it to --out. Repeatable."
        ),
    ] = None
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="COLUMN", help="Column of --rows that is no input: leave it out. Repeatable."),
    ] = None
    strings: Annotated[
        list[str] | None,
        typer.Option(
            "--strings",
            metavar="COLUMN",
            help="Column of a CSV file of --rows whose cells are strings instead of ids: one each. Repeatable.",
        ),
    ] = None
    dense: Annotated[
        str | None,
        typer.Option(
            "--dense",
            metavar="COLUMN",
            help="Column of --rows with the dense numbers, where a feature is called dense.",
            show_default="dense",
        ),
    ] = None
    context: Annotated[
        Path | None,
        typer.Option(
            "--context",
            help="JSON file with one row that applies to all rows, such as a user's features; the rows have the others.",
            show_default=False,
        ),
    ] = None
    concurrency: Annotated[int, typer.Option(min=1, help="Concurrent requests, with --rows.")] = 4
    format: Annotated[
        InputFormat | None, typer.Option("--format", help="Format of --input.", show_default="by the file's suffix")
    ] = None
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write the scores to this CSV file (.csv.gz: packed), one row per input row."),
    ] = None
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per request.")] = 1024
    client: ClientOptions
    as_json: JsonOption = False


@dataclass(frozen=True)
class _Input:
    """All rows of an input: dense inputs ``[N, d]`` or None, ids, the context's columns, the model and version that the
    input names, and other inputs."""

    dense: NDArray[Any] | None
    features: FeatureArrays
    context: Mapping[str, Any] | FeatureArrays | None = None
    model: str = ""
    version: str = ""
    inputs: Mapping[str, InputArrays] = field(default_factory=dict)


@takes(PredictOptions)
def run(options: PredictOptions) -> None:
    """Score rows with a running server.

    --input reads raw rows or JSON with ids. The client converts raw rows to ids by the model's feature contract, which
    it reads from the server. A CSV file's header names the contract's columns; a .csv file without a header is read in
    Criteo's format. JSON holds ids: {"dense": [[0.1, ...], ...], "features": {"C1": [[3, 7], [5]], ...}}. It may also
    have "inputs" (other inputs by name, one entry per row), "context" (features of one sample that apply to all rows),
    "model" and "version".

    --rows streams a file of any length. JSON lines: one object per line, {"C1": [3, 7], "tags": {"ids": [4], "weights":
    [0.5]}, "dense": [0.1]}. CSV and parquet: one column per feature and a column "dense"; in CSV separate ids by
    spaces, as in 3 7 or with weights 3:0.5 7:2. The model's other inputs are columns of their names, with numbers. --keep id --ignore label takes a file with a key and a label,
    and --dense numbers one whose model has a feature called dense. --context user.json holds the features (or the raw
    columns) that all rows share, in the form of a JSON line; they are sent once per request and looked up once. A row that fails does not affect other rows: the last
    column of --out holds its error, and the exit code is 1.
    """
    output, source = Output(options.as_json), options.input
    if (source is None) == (options.rows is None):
        raise ConfigError("got both --input and --rows, or neither; give one of them")
    if options.out is not None:
        check_place("--out", options.out)
        check_other_file("--out", options.out, source or options.rows)
    if source is not None and (options.keep or options.ignore or options.dense):
        raise ConfigError("got --keep, --ignore or --dense with --input; these are for --rows")
    if source is None:
        return _score_rows(options, output)
    kind = options.format or _format_of(source)
    if kind is InputFormat.json and options.context is not None:
        raise ConfigError('got --context with JSON; give it as "context" in the file of --input')
    parsed = _from_json(source) if kind is InputFormat.json else None
    with open_client(options.target, _named(options.client, parsed)) as client:
        if parsed is None:
            parsed = _from_rows(source, kind, client, options.context)
        outputs, missing = _predict(client, parsed, options.batch_size)
    num_rows = parsed.features.batch
    if missing:
        output.show(missing_text(missing))
    output.show(_table(outputs, num_rows))
    if options.out:
        _write(options.out, outputs)
        output.show(styled("green", "wrote", f" {options.out}  {num_rows} rows"))
    found = {name: values.tolist() for name, values in outputs.items()}
    output.finish({"rows": num_rows, "missing_ranks": missing, "outputs": found})


def _without(
    path: Path, rows: Iterator[Any], keep: Sequence[str], ignore: Sequence[str], kept: dict[int, list[str]]
) -> Iterator[Any]:
    """``rows`` of ``path`` without the columns that are not inputs; ``kept`` gets the cells of the columns to keep, by
    row number."""
    with naming(path):
        for at, row in enumerate(rows):
            if isinstance(row, dict) and (keep or ignore):
                kept[at] = [str(row.get(name, "")) for name in keep]
                row = {name: value for name, value in row.items() if name not in keep and name not in ignore}
            yield row


def _hinted(error: BaseException | None) -> str:
    """The error of a row; an error about an unknown column gets a hint at the options for columns that are not
    inputs."""
    text = str(error)
    no_ids = "expected ids separated by spaces" in text
    if not no_ids and "unknown features" not in text:
        return text
    also = ", --strings COLUMN reads its cells as strings" if no_ids else ""
    return f"{text} (--keep COLUMN copies a column that is no input to --out, --ignore COLUMN leaves it out{also})"


def _named_inputs(client: InferenceClient, dense: str) -> Collection[str]:
    """Names of the model's inputs beside features and the column ``dense``; none where the server does not answer, as each row
    then has the error. The dense numbers may have forward's name too."""
    try:
        return [one.name for one in client.get_model().inputs if one.kind != "ids" and one.name != dense]
    except RecinferError:
        return ()


def _context(path: Path, dense: str, inputs: Collection[str]) -> dict[str, Any]:
    """The features and inputs of one sample in a JSON file."""
    from recinfer.cli.rows import read_context
    from recinfer.serving.client.bulk import batch_of

    numbers, features, named = batch_of([read_context(path)], dense, inputs)
    if numbers is not None:
        raise InputError(f"--context {path}: got {dense!r}; the dense numbers differ by row, so the rows have them")
    return {**features, **named}


def _header(keep: list[str], names: list[str]) -> list[str]:
    """The columns of ``--out``: row number, kept columns, outputs, error. ``_`` after a name makes it unique."""
    from recinfer.columns import free_name

    kept = [free_name(name, names) for name in keep]
    return [free_name("row", [*kept, *names]), *kept, *names, free_name("error", [*kept, *names])]


def _score_rows(options: PredictOptions, output: Output) -> None:
    from rich import progress

    from recinfer.cli.rows import read_rows
    from recinfer.columns import DENSE

    assert options.rows is not None
    keep, ignore, dense = list(options.keep or ()), list(options.ignore or ()), options.dense or DENSE
    kept: dict[int, list[str]] = {}  # cells of rows that have no scores yet
    inputs: set[str] = set()  # filled before the first row is read
    read = read_rows(options.rows, [*keep, *ignore], dense, inputs, options.strings or ())
    rows = _without(options.rows, read, keep, ignore, kept)
    out = options.out or Path(os.devnull)
    done, failed = 0, 0
    first: list[list[str]] = []
    errors: list[dict[str, Any]] = []
    names: list[str] | None = None
    missing: set[int] = set()
    waiting: list[tuple[int, list[str], str]] = []  # rows that failed before the first scores gave the outputs' names
    columns = (progress.SpinnerColumn(), progress.TextColumn("{task.description}"), progress.TimeElapsedColumn())
    with (
        open_client(options.target, options.client) as client,
        naming(out),
        create_text(out) as file,
        progress.Progress(*columns, console=output.progress, transient=True) as shown,
    ):
        writer, task = csv.writer(file), shown.add_task("0 rows", total=None)
        inputs.update(_named_inputs(client, dense))
        context = None if options.context is None else _context(options.context, dense, inputs)
        for row in client.predict_many(
            rows,
            concurrency=options.concurrency,
            batch_size=options.batch_size,
            dense=dense,
            inputs=inputs,
            context=context,
        ):
            done += 1
            key = kept.pop(row.index, ["" for _ in keep])
            if row.error is not None:
                failed += 1
                if failed <= _SHOWN:
                    errors.append({"row": row.index, "error": _hinted(row.error)})
            if names is None and row.outputs is not None:
                names = list(row.outputs)
                writer.writerow(_header(keep, names))
                writer.writerows([at, *cells, *("" for _ in names), error] for at, cells, error in waiting)
                waiting.clear()
            if row.outputs is not None:
                missing.update(row.outputs.missing)
                values = [row.outputs[name] for name in names or ()]
                writer.writerow([row.index, *key, *map(_exact_text, values), ""])
                if len(first) < _SHOWN:
                    first.append([str(row.index), *map(_text, values)])
            elif names is None:
                waiting.append((row.index, key, _hinted(row.error)))
                if len(waiting) > _ALL_FAIL and row.error is not None:
                    output.note(f"all of the first {len(waiting):,} rows failed")
                    raise row.error
            else:
                writer.writerow([row.index, *key, *("" for _ in names), _hinted(row.error)])
            shown.update(task, description=f"{done:,} rows, {failed:,} failed")
        if names is None:
            writer.writerow(_header(keep, []))
            writer.writerows([at, *cells, error] for at, cells, error in waiting)
    if missing:
        output.show(missing_text(sorted(missing)))
    if first:
        table = Table("row", *(names or ()))
        for cells in first:
            table.add_row(*cells)
        output.show(table)
    for error in errors[:_SHOWN_ERRORS]:  # messages are long, and often the same
        output.show(f"row {error['row']}: {error['error']}")
    output.show(f"{done:,} rows, {failed:,} failed" + (f"; wrote {options.out}" if options.out else ""))
    output.finish(
        {"rows": done, "failed": failed, "missing_ranks": sorted(missing), "errors": errors, "out": options.out}
    )
    if failed:
        raise typer.Exit(EXIT_FAILED_CHECK)


def _format_of(path: Path) -> InputFormat:
    kind = _BY_SUFFIX.get(without_gz(path).suffix.lower())
    if kind is None:
        known = ", ".join(sorted(_BY_SUFFIX))
        raise ConfigError(
            f"--input {path}: unknown suffix {path.suffix!r}; give --format, or use one of {known}, or .gz behind one"
        )
    return kind


def _named(options: ClientOptions, parsed: _Input | None) -> ClientOptions:
    """``options`` with the model and version that the input names; raises ConfigError if ``options`` name different
    ones."""
    if parsed is None:
        return options
    model = _one_of("model", options.model, parsed.model)
    return replace(options, model=model, version=_one_of("version", options.version, parsed.version))


def _one_of(name: str, given: str, own: str) -> str:
    if given and own and given != own:
        raise ConfigError(f"--{name}: got {given!r}, but the input names {own!r}; leave one of them out")
    return given or own


def _from_rows(path: Path, kind: InputFormat, client: InferenceClient, context: Path | None) -> _Input:
    """Raw rows, converted by the served model's feature contract."""
    from recinfer.cli.rows import read_context
    from recinfer.data import read_columns, read_csv
    from recinfer.data.tables import first_line

    about = client.get_model()
    if about.contract is None:
        raise ConfigError(
            f"{client.target} serves {about.name} {about.version}, whose archive has no feature contract to convert "
            f"raw rows with; send ids as JSON (--format json)"
        )
    if kind is InputFormat.csv and not set(about.contract.columns).isdisjoint(_fields(first_line(path))):
        columns = read_csv(path)
    else:
        columns = read_columns(path, "criteo" if kind is InputFormat.csv else kind.value)
    if context is None:
        parsed = _Input(*about.contract.apply_arrays(columns))
    else:
        shared = {name: [value] for name, value in read_context(context).items()}
        dense, features, own = about.contract.apply_with_context(columns, shared)
        if features.keys:
            parsed = _Input(dense, features, own if own.keys else None)
        else:  # the rows differ in numbers alone, and a request has features in its rows
            repeated = {name: values * features.batch for name, values in shared.items()}
            parsed = _Input(*about.contract.apply_arrays({**columns, **repeated}))
    if not parsed.features.batch:
        raise InputError(f"{path}: got no rows, expected at least one")
    return parsed


def _fields(line: str) -> list[str]:
    return next(csv.reader([line]), [])


def _from_json(path: Path) -> _Input:
    """The rows of a JSON file; the TorchServe handler accepts the same format."""
    import numpy as np

    from recinfer.data.tables import cut_off
    from recinfer.serving.wire import json_codec

    try:
        data = read_bytes(path)
    except NOT_GZIP as error:
        raise cut_off(path, error) from error
    rows = json_codec.json_rows(json_codec.parse_json(data))
    batch = rows.features.batch
    if batch < 1:
        raise InputError(f"{path}: got no samples, expected at least one")
    empty = None if rows.inputs else np.zeros((batch, 0), np.float32)
    dense = empty if rows.dense is None else rows.dense
    if dense is not None and len(dense) != batch:
        raise InputError(f"dense: got {len(dense)} rows, expected one for each of {batch} samples")
    return _Input(dense, rows.features, rows.context, rows.model, rows.version, rows.inputs)


def _predict(client: InferenceClient, parsed: _Input, batch_size: int) -> tuple[dict[str, NDArray[Any]], list[int]]:
    """The model's outputs for all rows, requested ``batch_size`` rows at a time, and the ranks missing from any
    response."""
    import numpy as np

    found = []
    batch = parsed.features.batch
    for start in range(0, batch, batch_size):
        stop = min(start + batch_size, batch)
        dense = None if parsed.dense is None else parsed.dense[start:stop]
        features = parsed.features.rows(start, stop) if parsed.features.keys else None
        inputs = {name: given.rows(start, stop, batch) for name, given in parsed.inputs.items()}
        found.append(client.predict(dense, features, context=parsed.context, inputs=inputs))
    missing = sorted({rank for outputs in found for rank in outputs.missing})
    return {name: np.concatenate([outputs[name] for outputs in found]) for name in found[0]}, missing


def _table(outputs: dict[str, NDArray[Any]], num_rows: int) -> Table:
    table = Table("row", *outputs)
    for row in range(min(num_rows, _SHOWN)):
        table.add_row(str(row), *(_text(values[row]) for values in outputs.values()))
    if num_rows > _SHOWN:
        table.add_row("...", *(f"{num_rows - _SHOWN} more" for _ in outputs))
    return table


def _write(path: Path, outputs: dict[str, NDArray[Any]]) -> None:
    """Write a CSV with one column per output; several values of a row are separated by spaces."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(outputs)
    writer.writerows(zip(*(map(_exact_text, values) for values in outputs.values())))
    write_file(path, packed(path, text.getvalue().encode()))


def _exact_text(values: NDArray[Any]) -> str:
    """The shortest digits that read back as the same float32: scores that differ must not become equal in a file."""
    return " ".join(map(str, values.reshape(-1)))


def _text(values: NDArray[Any]) -> str:
    return " ".join(f"{value:.6g}" for value in values.reshape(-1).tolist())
