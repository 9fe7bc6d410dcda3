"""The options of commands that concern vocabularies, and what commands make of them (see :mod:`recinfer.cli.id_options`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recinfer.cli.options import parse_pair
from recinfer.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.table import Table

    from recinfer.data.contract import FeatureContract
    from recinfer.data.dataset import Dataset

__all__ = [
    "ComparedVocabularies",
    "NewVocabularyFiles",
    "PlannedVocabularyFiles",
    "VocabularyFiles",
    "VocabularyKind",
    "read_vocabularies",
]


@dataclass(frozen=True)
class VocabularyFiles:
    """Options of ``recinfer export``: the vocabularies that are in files."""

    vocabulary: Annotated[
        list[str] | None,
        typer.Option(
            "--vocabulary",
            metavar="FEATURE=FILE",
            help="File with one string per line: requests may then give the feature's ids as strings, the first line for row 0. Other "
            "strings read the row behind the last line's. Or a .npy file of int64 ids: requests then hold these ids in place of rows. "
            "Repeatable. A feature contract's vocabularies need no option.",
            show_default=False,
        ),
    ] = None

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the export, or of the delta, that the files give; raises ConfigError for files of another form."""
        return {"vocabularies": read_vocabularies(self.vocabulary)}

    def indexed(self, contract: FeatureContract | None) -> dict[str, int]:
        """Feature -> number of its strings or raw ids, as :func:`~recinfer.distributed.planner.plan_inference` takes them.

        Args:
            contract: the feature contract of the export.
        """
        from recinfer.data.transforms import Vocabulary

        own = [(f.name, f.transform) for f in contract.sparse] if contract else []
        sizes = {name: len(made.tokens) for name, made in own if isinstance(made, Vocabulary)}
        return sizes | {name: len(ids) for name, ids in self.arguments["vocabularies"].items()}


@dataclass(frozen=True)
class PlannedVocabularyFiles(VocabularyFiles):
    """Options of ``recinfer plan``."""

    vocabulary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FEATURE=FILE",
            help="File of strings or ids that `recinfer export` will be given, so that the plan counts its index; repeatable.",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True)
class NewVocabularyFiles(VocabularyFiles):
    """Options of ``recinfer delta``."""

    vocabulary: Annotated[
        list[str] | None,
        typer.Option(
            "--vocabulary",
            metavar="FEATURE=FILE",
            help=".npy file of int64 ids, for each feature of which `recinfer export` was given one; ids may differ from that file's, "
            "their number may not. Or a file of strings, to make sure that they are still those of the archive. Repeatable. Managed "
            "collisions need no option.",
            show_default=False,
        ),
    ] = None


class VocabularyKind(StrEnum):
    """Values of ``recinfer demo --vocabulary``."""

    full = "full"
    managed = "managed"


@dataclass(frozen=True)
class ComparedVocabularies:
    """Options of ``recinfer demo``."""

    vocabulary: Annotated[
        VocabularyKind,
        typer.Option(
            help="managed: train with a row for each id, then with a tenth of the rows, with hashed ids and with managed "
            "collisions, compare the three, and export and serve the last, which takes raw 64-bit ids."
        ),
    ] = VocabularyKind.full

    def train(
        self,
        dataset: Dataset,
        checkpoint: Path,
        *,
        epochs: int,
        embedding_dim: int,
        seed: int,
        note: Callable[[str], None],
    ) -> tuple[Table, dict[str, Any]] | None:
        """Train with three vocabularies, of which the last one's checkpoint is written.

        Returns:
            their quality side by side, and as plain data; None where the option asks for no other training than the demo's.
        """
        if self.vocabulary is VocabularyKind.full:
            return None
        from rich.table import Table

        from recinfer.vocabulary.comparison import compare_vocabularies

        note("vocabularies: a row for each id, then a tenth of the rows: hashed ids, raw ids with managed collisions")
        shown = Table("vocabulary", "rows", "AUC", "log-loss", "ids admitted", "evicted", title="held-out rows")
        for column in shown.columns[1:]:
            column.justify = "right"
        results = list(
            compare_vocabularies(dataset, embedding_dim=embedding_dim, epochs=epochs, seed=seed, out=checkpoint)
        )
        for result in results:
            moved = (f"{n:,}" if result.ids_admitted else "" for n in (result.ids_admitted, result.ids_evicted))
            shown.add_row(result.name, f"{result.rows:,}", f"{result.auc:.5f}", f"{result.log_loss:.5f}", *moved)
        return shown, {"vocabularies": [asdict(result) for result in results]}


def read_vocabularies(pairs: list[str] | None) -> dict[str, list[str] | NDArray[np.int64]]:
    """``["city=cities.txt", "item=ids.npy"]`` as {"city": strings, "item": int64 ids}; raises ConfigError for files of another form."""
    found: dict[str, list[str] | NDArray[np.int64]] = {}
    for pair in pairs or ():
        feature, path = parse_pair(pair, "--vocabulary", "FEATURE=FILE", at_first=True)
        if feature in found:
            raise ConfigError(f"--vocabulary: got feature {feature!r} twice; expected it once")
        try:
            if path.endswith(".npy"):
                found[feature] = _ids_of_file(path)
            else:
                text = Path(path).read_bytes().decode("utf-8-sig")
                found[feature] = text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []
        except OSError as error:
            raise ConfigError(
                f"--vocabulary {path}: {error.strerror}; expected a file with one string per line, or a .npy file of int64 ids"
            ) from None
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"--vocabulary {path}: byte {error.start} is no UTF-8; expected one string per line"
            ) from None
    return found


def _ids_of_file(path: str) -> NDArray[np.int64]:
    import numpy as np

    try:
        found = np.load(path, allow_pickle=False)
    except (ValueError, EOFError):
        raise ConfigError(
            f"--vocabulary {path}: no array of numbers; expected int64 [N] as numpy.save writes it"
        ) from None
    if not isinstance(found, np.ndarray) or found.ndim != 1 or found.dtype not in (np.int64, np.int32):
        got = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else "several arrays"
        raise ConfigError(f"--vocabulary {path}: got {got}; expected int64 [N]")
    return found.astype(np.int64)
