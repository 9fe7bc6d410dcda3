"""``recinfer lookup``: looks ids up in a running server and prints their embeddings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recinfer.cli.client import ClientOptions, TargetOption, missing_text, open_client
from recinfer.cli.console import JsonOption, Output
from recinfer.cli.declared import takes
from recinfer.cli.options import parse_pair
from recinfer.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recinfer.columns import FeatureArrays

__all__ = ["EXAMPLE", "NAME", "LookupOptions", "parse_features", "run"]

NAME = "lookup"
EXAMPLE = "Example: recinfer lookup --target 127.0.0.1:8500 --feature C1=3,7 --feature C2=5"

_EXPECTED = "NAME=IDS, as in C1=3,7 (one sample), C1=3,7;5 (two) or C1=3:0.5,7:1 (weighted)"


@dataclass(frozen=True, kw_only=True)
class LookupOptions:
    """The options of ``recinfer lookup``."""

    target: TargetOption
    feature: Annotated[
        list[str],
        typer.Option(
            "--feature",
            metavar="NAME=IDS",
            help="Ids of a feature, as in C1=3,7. Separate samples by ';' and give weights after ':'. Repeatable.",
        ),
    ]
    strings: Annotated[
        list[str] | None,
        typer.Option(
            "--strings",
            metavar="NAME",
            help="Feature whose ids in --feature are strings, as in city=paris,rome, without weights. Repeatable.",
        ),
    ] = None
    client: ClientOptions
    as_json: JsonOption = False


@takes(LookupOptions)
def run(options: LookupOptions) -> None:
    """Look up the embeddings of ids in a running server."""
    from rich.table import Table

    output = Output(options.as_json)
    features = parse_features(options.feature, options.strings or ())
    with open_client(options.target, options.client) as client:
        result = client.lookup(features)
    pooled: dict[str, NDArray[Any]] = result.pooled or {}
    table = Table(
        "feature", "sample", "vectors", "dim", "embedding", title=f"{options.target}  version {result.model_version}"
    )
    for name, values in pooled.items():
        for sample, row in enumerate(values):
            table.add_row(name, str(sample), "1", str(row.size), _preview(row))
    for name, samples in result.sequences.items():
        for sample, rows in enumerate(samples):
            table.add_row(name, str(sample), str(len(rows)), str(rows.shape[-1]), _preview(rows.flatten()))
    if result.missing_ranks:
        output.show(missing_text(result.missing_ranks))
    output.show(table)
    output.finish(
        {
            "batch_size": features.batch,
            "model_version": result.model_version,
            "missing_ranks": list(result.missing_ranks),
            "pooled": {name: values.tolist() for name, values in pooled.items()},
            "sequences": {name: [rows.tolist() for rows in samples] for name, samples in result.sequences.items()},
        }
    )


def parse_features(texts: list[str], strings: Collection[str] = ()) -> FeatureArrays:
    """``["C1=3,7;5", "C2=1;"]`` as ids of two features for two samples.

    Args:
        strings: features whose ids are strings.

    Raises:
        ConfigError: text of another form, a feature twice, features with different numbers of samples, or weights on
            some ids of a feature only; ``strings`` that are not in ``texts``.
    """
    from recinfer.columns import as_features

    pairs = [parse_pair(text, "--feature", _EXPECTED, allow_empty=True) for text in texts]
    if absent := [name for name in strings if name not in dict(pairs)]:
        raise ConfigError(f"--strings {absent[0]}: no --feature has this name; got {', '.join(dict(pairs)) or 'none'}")
    bags: dict[str, list[Any]] = {
        name: [_parse_strings(bag) if name in strings else _parse_bag(bag, text) for bag in ids.split(";")]
        for (name, ids), text in zip(pairs, texts)
    }
    if len(bags) < len(pairs):
        raise ConfigError(
            f"--feature: a name occurs twice in {', '.join(texts)}; give each feature once and separate samples by ';'"
        )
    sizes = {name: len(samples) for name, samples in bags.items()}
    if len(set(sizes.values())) > 1:
        raise ConfigError(
            f"--feature: got different numbers of samples, {sizes}; expected the same number for all features"
        )
    return as_features({name: _column(name, samples) for name, samples in bags.items()})


def _parse_strings(text: str) -> list[tuple[str, None]]:
    return [(part, None) for part in text.split(",")] if text else []


def _column(name: str, samples: list[list[tuple[Any, float | None]]]) -> Any:
    """Ids of each sample, with their weights if the text has weights."""
    ids = [[id_ for id_, _ in bag] for bag in samples]
    weights = [[weight for _, weight in bag if weight is not None] for bag in samples]
    count, given = sum(map(len, ids)), sum(map(len, weights))
    if given and given < count:
        raise ConfigError(f"--feature {name}: {given} of {count} ids have weights; expected all or none")
    return (ids, weights) if given else ids


def _parse_bag(text: str, whole: str) -> list[tuple[int, float | None]]:
    """``3:0.5,7:1`` as [(3, 0.5), (7, 1.0)]; empty text is an empty bag."""
    bag: list[tuple[int, float | None]] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        id_, _, weight = part.partition(":")
        try:
            bag.append((int(id_), float(weight) if weight else None))
        except ValueError:
            raise ConfigError(
                f"--feature {whole!r}: {part!r} is not an id; expected {_EXPECTED}, or --strings NAME for ids that are strings"
            ) from None
    return bag


def _preview(values: NDArray[Any], shown: int = 4) -> str:
    text = " ".join(f"{v:+.4f}" for v in values[:shown].tolist())
    return text + (" ..." if values.size > shown else "")
