"""Writes the screenshots of docs/images/: the status page of a running server, and the plot of a plan.

    python tools/docs_screenshots.py          # needs Chromium and the extras cpu,onnx,train,serve,plot

It trains and exports a small model, serves it on loopback under a few seconds of load, and takes the screenshot.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs/images"


def free_port() -> int:
    """A free TCP port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Write both screenshots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", default="chromium")
    options = parser.parse_args()
    recinfer = [sys.executable, "-m", "recinfer"]
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:

        def run(*arguments: str) -> None:
            subprocess.run([*recinfer, *arguments], cwd=folder, check=True)

        run("train", "--format", "synthetic", "--limit", "20000", "--out", "model.ckpt")
        plot = str(IMAGES / "plan-plot.png")
        run("plan", "--checkpoint", "model.ckpt", "--world-size", "4", "--out", "plan.json", "--plot", plot)
        run("export", "--checkpoint", "model.ckpt", "--plan", "plan.json", "--out", "model.rqa", "--name", "ctr")
        port, metrics = free_port(), free_port()
        server = [*recinfer, "serve", "model.rqa", "--port", str(port), "--metrics-port", str(metrics)]
        with subprocess.Popen(server, cwd=folder) as process:
            try:
                target = f"127.0.0.1:{port}"
                run("lookup", "--wait", "60", "--target", target, "--feature", "C1=3,7", "--feature", "C2=5")
                load = [*recinfer, "bench", "serve", "--target", target, "--concurrency", "4", "--duration", "25"]
                with subprocess.Popen(load, cwd=folder, stdout=subprocess.DEVNULL) as loading:
                    time.sleep(6)  # the load has to import torch first
                    command = [options.chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
                    command += ["--window-size=1200,1100", "--virtual-time-budget=30000"]
                    page = f"http://127.0.0.1:{metrics}/"
                    picture = f"--screenshot={IMAGES / 'status-page.png'}"
                    subprocess.run([*command, picture, page], check=True, timeout=60, stderr=subprocess.DEVNULL)
                    loading.terminate()
            finally:
                process.terminate()
    print(f"wrote status-page.png and plan-plot.png in {IMAGES}")


if __name__ == "__main__":
    main()
