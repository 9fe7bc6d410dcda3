"""Downloads an archive into a volume, in a container that ends before the server starts.

    python fetch.py URL FOLDER [--sha256 HEX]

URL is the address of a tar (.tar or .tar.gz) of the folder of a version, or of what is in it. FOLDER, for example
/models/ctr/1, is complete or absent: the files are unpacked beside it and renamed. A FOLDER that is there is kept, so a
container that starts again downloads nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any

TRIES, SECONDS = 5, 60.0
MANIFEST = "manifest.json"


class Hashing:
    """A stream that hashes what is read from it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.hash = hashlib.sha256()
        self.count = 0

    def read(self, size: int = -1) -> bytes:
        """At most ``size`` bytes."""
        data = self.stream.read(size)
        self.hash.update(data)
        self.count += len(data)
        return data


def fetch(url: str, folder: Path, sha256: str | None) -> int:
    """Download and unpack; returns the number of bytes that came. Raises OSError, tarfile.TarError or ValueError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as beside:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            expected, stream = answer.headers.get("Content-Length"), Hashing(answer)
            reader: Any = stream
            with tarfile.open(fileobj=reader, mode="r|*") as tar:
                tar.extractall(beside, filter="data")  # no absolute path, no link that leads out
            while stream.read(1 << 20):  # what follows the end of the tar
                pass
        if expected is not None and stream.count != int(expected):
            raise ValueError(f"got {stream.count} bytes of {expected}")
        if sha256 and stream.hash.hexdigest() != sha256.lower():
            raise ValueError(f"the SHA-256 is {stream.hash.hexdigest()}, expected {sha256.lower()}")
        found = sorted(path.parent for path in Path(beside).rglob(MANIFEST))
        if not found:
            raise ValueError(f"the tar has no {MANIFEST}; expected the folder of an archive")
        top = min(found, key=lambda path: len(path.parts))
        top.chmod(0o755)
        os.rename(top, folder)
    return stream.count


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if the archive is there; else 1, with the reason on stderr."""
    parser = argparse.ArgumentParser(description="Downloads an archive into a folder.")
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sha256")
    options = parser.parse_args(arguments)
    folder: Path = options.folder
    if (folder / MANIFEST).is_file():
        print(f"{folder} is there; nothing to download")
        return 0
    for left in reversed(range(TRIES)):
        try:
            count = fetch(options.url, folder, options.sha256)
        except (OSError, tarfile.TarError, ValueError, EOFError) as error:
            # A file that is not there, or that is another, stays so: the next try is the next start of the container.
            is_final = isinstance(error, ValueError) or (isinstance(error, urllib.error.HTTPError) and error.code < 500)
            print(f"{options.url}: {error}; {'giving up' if is_final or not left else 'again'}", file=sys.stderr)
            if is_final or not left:
                return 1
            time.sleep(2.0 * (TRIES - left))
        else:
            print(f"{folder}: {count:,} bytes from {options.url}, {shutil.disk_usage(folder).free:,} bytes free")
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
