"""Rotates authority, certificates and token of a server and its clients under load, and counts failed requests.

    python tools/rotation_trial.py --swaps 20 --callers 32

Run it from the repository's root, with recinfer's extras cpu, onnx and serve, and the openssl command.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recinfer.inference.predictor import load
from recinfer.serving.server.server import Server
from tests.rotating import Callers, Files
from tests.serving.conftest import build_model, export, make_request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=20, help="rotations, of three steps each")
    parser.add_argument("--callers", type=int, default=32, help="threads, each with its own client")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recinfer-rotation-") as folder:
        counts = run(Path(folder), options.swaps, options.callers)
    failed = {outcome: count for outcome, count in counts.items() if outcome != "OK"}
    print(
        f"{options.swaps} swaps under {options.callers} callers: {counts['OK']} answers, {sum(failed.values())} failed"
    )
    for outcome, count in failed.items():
        print(f"{count:8d} {outcome}")
    sys.exit(bool(failed))


def run(folder: Path, swaps: int, callers: int) -> dict[str, int]:
    """The outcomes of all requests, by name."""
    archive = export(build_model(), folder, "tiny", "1")
    (folder / "tls").mkdir()
    files = Files(folder / "tls")
    security = files.security()
    with Server({"tiny": load(archive)}, http_port=0, security=security) as server:
        load_of = Callers(server, files, callers, make_request(1, 2)[1])
        with load_of.sending():
            for swap in range(swaps):
                begin = time.monotonic()
                files.swap(security, load_of.clients)
                sent = sum(load_of.counts.values())
                print(f"swap {swap + 1}: {time.monotonic() - begin:.1f} s, {sent} requests so far", file=sys.stderr)
    return load_of.counts


if __name__ == "__main__":
    main()
