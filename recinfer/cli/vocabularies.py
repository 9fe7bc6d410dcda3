"""The options of commands that take vocabularies in files, and the files."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recinfer.cli.options import parse_pair
from recinfer.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from recinfer.data.contract import FeatureContract

__all__ = ["NewIdsOption", "VocabularyOption", "indexed_ids", "read_vocabularies"]

VocabularyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--vocabulary",
        metavar="FEATURE=FILE",
        help="File with one string per line: requests may then give the feature's ids as strings, the first line for row 0. Other "
        "strings read the row behind the last line's. Or a .npy file of int64 ids: requests then hold these ids in place of rows. "
        "Repeatable. A feature contract's vocabularies need no option.",
        show_default=False,
    ),
]
NewIdsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--vocabulary",
        metavar="FEATURE=FILE",
        help=".npy file of int64 ids, for each feature of which `recinfer export` was given one; ids may differ from that file's, their "
        "number may not. Or a file of strings, to make sure that they are still those of the archive. Repeatable. Managed collisions need "
        "no option.",
        show_default=False,
    ),
]


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


def indexed_ids(contract: FeatureContract | None, given: Mapping[str, Sized]) -> dict[str, int]:
    """Feature -> number of its strings or raw ids, as :func:`~recinfer.distributed.planner.plan_inference` takes them.

    Args:
        contract: the feature contract of the export.
        given: the content of :func:`read_vocabularies`.
    """
    return {**(contract.vocabulary_sizes if contract else {}), **{name: len(ids) for name, ids in given.items()}}


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
