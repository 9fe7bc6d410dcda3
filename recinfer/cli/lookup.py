"""``recinfer lookup``: ids to embeddings, from a running server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recinfer.cli.client import ClientOptions, TargetOption, missing_text, open_client
from recinfer.cli.console import JsonOption, Output
from recinfer.cli.declared import takes
from recinfer.cli.options import parse_pair
from recinfer.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from recinfer.sparse import JaggedTensor, KeyedJaggedTensor

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
        typer.Option("--feature", metavar="NAME=IDS", help="Ids of a feature: 3,7; samples by ';', weights by ':'."),
    ]
    client: ClientOptions
    as_json: JsonOption = False


@takes(LookupOptions)
def run(options: LookupOptions) -> None:
    """Look embeddings up in a running server."""
    from rich.table import Table

    output = Output(options.as_json)
    kjt = parse_features(options.feature)
    with open_client(options.target, options.client) as client:
        result = client.lookup(kjt)
    pooled = {} if result.pooled is None else result.pooled.to_dict()
    table = Table(
        "feature", "sample", "vectors", "dim", "embedding", title=f"{options.target}  version {result.model_version}"
    )
    for name, values in pooled.items():
        for sample, row in enumerate(values):
            table.add_row(name, str(sample), "1", str(row.numel()), _preview(row))
    for name, jagged in result.sequences.items():
        for sample, rows in enumerate(jagged.to_dense()):
            table.add_row(name, str(sample), str(len(rows)), str(rows.shape[-1]), _preview(rows.flatten()))
    if result.missing_ranks:
        output.show(missing_text(result.missing_ranks))
    output.show(table)
    output.finish(
        {
            "batch_size": kjt.stride(),
            "model_version": result.model_version,
            "missing_ranks": list(result.missing_ranks),
            "pooled": {name: values.tolist() for name, values in pooled.items()},
            "sequences": {name: _rows(jagged) for name, jagged in result.sequences.items()},
        }
    )


def parse_features(texts: list[str]) -> KeyedJaggedTensor:
    """``["C1=3,7;5", "C2=1;"]`` as ids of two features for two samples.

    Raises:
        ConfigError: text of another form, a feature twice, features with different numbers of samples, or weights on
            some ids only.
    """
    import torch

    from recinfer.sparse import KeyedJaggedTensor

    pairs = [parse_pair(text, "--feature", _EXPECTED, allow_empty=True) for text in texts]
    bags = {name: [_parse_bag(bag, text) for bag in ids.split(";")] for (name, ids), text in zip(pairs, texts)}
    if len(bags) < len(pairs):
        raise ConfigError(f"--feature: a name is given twice in {', '.join(texts)}; expected each once, samples by ';'")
    sizes = {name: len(samples) for name, samples in bags.items()}
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"--feature: numbers of samples differ: {sizes}; expected the same for all features")
    flat = [item for samples in bags.values() for bag in samples for item in bag]
    weights = [weight for _, weight in flat if weight is not None]
    if weights and len(weights) < len(flat):
        raise ConfigError(f"--feature: {len(weights)} of {len(flat)} ids have weights; expected all or none")
    return KeyedJaggedTensor(
        keys=list(bags),
        values=torch.tensor([id_ for id_, _ in flat], dtype=torch.int64),
        lengths=torch.tensor([len(bag) for samples in bags.values() for bag in samples], dtype=torch.int32),
        weights=torch.tensor(weights, dtype=torch.float32) if weights else None,
    )


def _parse_bag(text: str, whole: str) -> list[tuple[int, float | None]]:
    """``3:0.5,7:1`` as [(3, 0.5), (7, 1.0)]; empty text is an empty bag."""
    bag: list[tuple[int, float | None]] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        id_, _, weight = part.partition(":")
        try:
            bag.append((int(id_), float(weight) if weight else None))
        except ValueError:
            raise ConfigError(f"--feature {whole!r}: {part!r} is no id; expected {_EXPECTED}") from None
    return bag


def _preview(values: Tensor, shown: int = 6) -> str:
    text = " ".join(f"{v:+.4f}" for v in values[:shown].tolist())
    return text + (" ..." if values.numel() > shown else "")


def _rows(jagged: JaggedTensor) -> list[Any]:
    return [rows.tolist() for rows in jagged.to_dense()]
