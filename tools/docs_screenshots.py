"""Writes the screenshots of docs/images/: the status pages of a server and of a ranker, and the plot of a plan.

    python tools/docs_screenshots.py                  # needs Chromium and the extras cpu,onnx,train,serve,plot
    python tools/docs_screenshots.py --review FOLDER  # to look at: each page light and dark, idle, and without a rank

It trains and exports a small model, serves it on loopback under a few seconds of load, and takes the screenshots.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs/images"
RECINFER = [sys.executable, "-m", "recinfer"]
_DARK = {"": "1", "-dark": "0"}  # Blink's setting of the preferred color scheme


def free_port() -> int:
    """A free TCP port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Pictures:
    """Takes pictures of pages with Chromium.

    Args:
        folder: of the pictures.
        schemes: by a suffix of the pictures' names, Blink's setting of the color scheme.
        height: of the window, in pixels.
    """

    def __init__(self, chromium: str, folder: Path, schemes: dict[str, str], height: int = 1100) -> None:
        self._chromium, self._folder, self._schemes, self._height = chromium, folder, schemes, height

    def take(self, name: str, port: int, *, width: int = 1200) -> None:
        """Write pictures of the page of a metrics port."""
        for suffix, scheme in self._schemes.items():
            picture = self._folder / f"{name}{suffix}.png"
            command = [self._chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            command += [f"--window-size={width},{self._height}", "--virtual-time-budget=30000"]
            command += [f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={picture}"]
            subprocess.run([*command, f"http://127.0.0.1:{port}/"], check=True, timeout=300, stderr=subprocess.DEVNULL)
            print(f"wrote {picture}", flush=True)


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """A server in ``folder``: its process, port and metrics port; it may still load."""
    port, metrics = free_port(), free_port()
    command = [*RECINFER, "serve", *arguments, "--port", str(port), "--metrics-port", str(metrics)]
    with subprocess.Popen(command, cwd=folder) as process:
        try:
            yield process, port, metrics
        finally:
            process.terminate()


@contextmanager
def loaded(folder: Path, port: int) -> Iterator[None]:
    """A server under load, from six seconds after the client's begin on."""
    load = ["bench", "serve", "--target", f"127.0.0.1:{port}", "--concurrency", "4", "--duration", "600"]
    with subprocess.Popen([*RECINFER, *load], cwd=folder, stdout=subprocess.DEVNULL) as loading:
        time.sleep(6)  # the load has to import torch first
        try:
            yield
        finally:
            loading.terminate()


def main() -> None:
    """Write the screenshots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", default="chromium")
    parser.add_argument("--review", type=Path, metavar="FOLDER", help="pictures of more states, to look at")
    options = parser.parse_args()
    images = options.review or IMAGES
    images.mkdir(exist_ok=True)
    pictures = Pictures(options.chromium, images, _DARK if options.review else {"": "1"})
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)

        def run(*arguments: str) -> None:
            subprocess.run([*RECINFER, *arguments], cwd=folder, check=True)

        def wait(port: int) -> None:
            run("lookup", "--wait", "300", "--target", f"127.0.0.1:{port}", "--feature", "C1=3,7", "--feature", "C2=5")

        run("train", "--format", "synthetic", "--limit", "20000", "--out", "model.ckpt")
        plot = str(images / "plan-plot.png")
        run("plan", "--checkpoint", "model.ckpt", "--world-size", "4", "--out", "plan.json", "--plot", plot)
        run("export", "--checkpoint", "model.ckpt", "--plan", "plan.json", "--out", "model.rqa", "--name", "ctr")
        with serving(folder, "model.rqa") as (_, port, metrics):
            wait(port)
            if options.review:
                pictures.take("status-page-idle", metrics)
            with loaded(folder, port):
                pictures.take("status-page", metrics)
                if options.review:
                    pictures.take("status-page-narrow", metrics, width=400)
        first = stack.enter_context(serving(folder, "model.rqa", "--ranks", "0,1"))
        second = stack.enter_context(serving(folder, "model.rqa", "--ranks", "2,3"))
        ranks = {rank: [f"127.0.0.1:{port}"] for group, port in (("01", first[1]), ("23", second[1])) for rank in group}
        ranks["0"].append(f"127.0.0.1:{free_port()}")  # a replica that does not answer
        shards = {"format": "recinfer.shards", "version": 1, "ranks": ranks}
        (folder / "shards.json").write_text(json.dumps(shards))
        with serving(folder, "model.rqa", "--shards", "shards.json") as (_, port, metrics):
            wait(port)
            with loaded(folder, port):
                pictures.take("status-page-ranker", metrics)
            if options.review:
                second[0].terminate()
                second[0].wait()
                pictures.take("status-page-ranker-red", metrics)
                pictures.take("status-page-ranker-narrow", metrics, width=400)


if __name__ == "__main__":
    main()
