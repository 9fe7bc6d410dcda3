"""Packs an archive for TorchServe: a model entry with the handler and the path of the archive's folder."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from recinfer.archive.manifest import Manifest
from recinfer.archive.reader import open_archive
from recinfer.errors import InputError, UnavailableError
from recinfer.files import write_file

__all__ = ["ARCHIVE_FORMATS", "pack"]

# The supported formats of torch-model-archiver, with the suffix that each appends to the entry's name.
ARCHIVE_FORMATS = {"no-archive": "", "zip-store": ".mar"}

_HANDLER = "recinfer_handler.py"
_CONFIG = "model-config.yaml"
# The archiver works in the shared temporary folder, under the model's name, and empties it first, so each call gets a
# folder of its own.
_ARCHIVER = (
    "import sys, tempfile; tempfile.tempdir = sys.argv.pop(1); "
    "from model_archiver.model_packaging import generate_model_archive; generate_model_archive()"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*")


def pack(
    archive: str | Path,
    export_path: str | Path,
    *,
    archive_format: str = "no-archive",
    model_name: str | None = None,
    archive_at: str | Path | None = None,
    workers: int = 1,
    batch_size: int = 1,
    max_batch_delay_ms: int = 1,
    max_response_bytes: int = 6_500_000,
    force: bool = False,
) -> Path:
    """Write the TorchServe model entry of an archive with torch-model-archiver, and return its path.

    The archive's gigabytes are not copied: the entry is a few kilobytes and names the folder, so the folder must stay.

    Args:
        archive: the archive's folder.
        export_path: TorchServe's model store; made if absent.
        archive_format: ``"no-archive"`` (a folder) or ``"zip-store"`` (one .mar file).
        model_name: the model's name in TorchServe; None: the archive's model name.
        archive_at: the archive's path for TorchServe, if it differs from ``archive`` (a path inside a container).
        workers: worker processes that TorchServe starts; they share the mapped archive's memory.
        batch_size: requests that TorchServe passes to a worker at once. With more than 1, an error keeps its HTTP code but
            not its gRPC status (see docs/how-to/torchserve.md).
        max_batch_delay_ms: milliseconds for which TorchServe waits for a full batch.
        max_response_bytes: bytes of the answers to one batch. An answer above TorchServe's own max_response_size (6,553,500
            unless set) would kill the worker, so the handler refuses it first; raise the two together.
        force: overwrite an entry of that name.

    Raises:
        ArchiveError: the archive is damaged.
        InputError: a bad argument, or an entry that exists.
        UnavailableError: torch-model-archiver is not installed.
    """
    if archive_format not in ARCHIVE_FORMATS:
        raise InputError(f"archive_format: got {archive_format!r}, expected one of {', '.join(ARCHIVE_FORMATS)}")
    counts = {
        "workers": workers,
        "batch_size": batch_size,
        "max_batch_delay_ms": max_batch_delay_ms,
        "max_response_bytes": max_response_bytes,
    }
    for what, value in counts.items():
        if value < 1:
            raise InputError(f"{what}: got {value}, expected at least 1")
    folder = Path(archive).resolve()
    manifest = open_archive(folder).manifest
    name = manifest.model if model_name is None else model_name
    if not _NAME.fullmatch(name):
        raise InputError(
            f"model name: got {name!r}, expected letters, digits, '_', '.', '-' (TorchServe's rule); give model_name"
        )
    store = Path(export_path).resolve()
    store.mkdir(parents=True, exist_ok=True)
    entry = store / f"{name}{ARCHIVE_FORMATS[archive_format]}"
    if entry.exists() and not force:
        raise InputError(f"{entry} exists already; remove it, choose another export path, or overwrite with force")
    config = {
        "minWorkers": workers,
        "maxWorkers": workers,
        "batchSize": batch_size,
        "maxBatchDelay": max_batch_delay_ms,
        "handler": {
            "archive": str(archive_at if archive_at is not None else folder),
            "max_response_bytes": max_response_bytes,
        },
    }
    _run_archiver(name, manifest, config, store, archive_format)
    return entry


def _run_archiver(name: str, manifest: Manifest, config: dict[str, object], store: Path, archive_format: str) -> None:
    if importlib.util.find_spec("model_archiver") is None:
        raise UnavailableError(
            "torch-model-archiver is not installed; install it with: pip install torch-model-archiver"
        )
    with tempfile.TemporaryDirectory(prefix="recinfer-mar-") as work:
        # JSON is valid YAML and quotes every character of a path.
        write_file(Path(work) / _CONFIG, (json.dumps(config, indent=2) + "\n").encode())
        shutil.copyfile(_handler(), Path(work) / _HANDLER)
        (Path(work) / "tmp").mkdir()
        command = [sys.executable, "-c", _ARCHIVER, str(Path(work) / "tmp"), "--force"]
        command += ["--model-name", name, "--version", manifest.version, "--handler", _HANDLER]
        command += ["--config-file", _CONFIG, "--archive-format", archive_format, "--export-path", str(store)]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise UnavailableError(
            f"torch-model-archiver, which writes {name!r} to {str(store)!r}, failed with exit code {done.returncode}: {last}"
        )


def _handler() -> Path:
    """The path of the handler's file, in the source tree or where an install put it."""
    root = Path(__file__).resolve().parents[2]
    # An environment, `pip install --user` and `pip install --target` have three places for a package's data.
    bases = (root, Path(sysconfig.get_path("data")), Path(site.getuserbase()))
    folders = [root / "handlers", *(base / "share" / "recinfer" / "handlers" for base in bases)]
    for folder in folders:
        if (folder / _HANDLER).is_file():
            return folder / _HANDLER
    raise UnavailableError(f"{_HANDLER} is in none of {', '.join(map(str, folders))}; install recinfer again")
