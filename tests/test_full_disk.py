"""Whatever writes a file names it when the disk is full: one writer after the other, under a limit of the size of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.warm import run_program

LIMIT = """
import os, resource, sys
import numpy as np
folder, path = sys.argv[1], sys.argv[2]

def full():
    # Writes fail as they do on a full disk, but with another errno.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
"""

TRY = """
try:
    work()
except (OSError, UnavailableError) as error:
    print(error)
"""

# Each program defines work(), which writes to ``path``.
WRITERS = {
    "table.csv": """
from recinfer.data.tables import write_csv
def work():
    full()
    write_csv(path, {"a": [str(at) for at in range(1000)]})
""",
    "table.csv.gz": """
from recinfer.data.tables import write_csv
def work():
    full()
    write_csv(path, {"a": [os.urandom(8).hex() for at in range(1000)]})
""",
    "metrics.csv": """
from recinfer.training.curve import Curve
def work():
    curve = Curve(path)
    full()
    for step in range(10):
        curve.add_step(step, 0, step, 0.5)
""",
    "resumed.csv": """
from recinfer.training.curve import Curve
def work():
    curve = Curve(path)
    full()
    curve.restore([{"step": at, "seconds": 1.0, "samples": at} for at in range(10)])
""",
    "curve.png": """
from recinfer.training.curve import Curve
def work():
    full()
    Curve().plot(path)
""",
    "latency.svg": """
from pathlib import Path
from recinfer.cli.plot_latency import plot_latency
def work():
    full()
    plot_latency([], Path(path))
""",
    "ids.npy": """
from recinfer.datasets.criteo_binary import BinaryCriteoUtils
def work():
    np.save(os.path.join(folder, "ids.in"), np.arange(2600).reshape(100, 26))
    os.rename(os.path.join(folder, "ids.in.npy"), os.path.join(folder, "ids.in"))
    full()
    BinaryCriteoUtils.sparse_to_contiguous([os.path.join(folder, "ids.in")], folder, output_file_suffix=".npy")
""",
    "model.ckpt": """
import torch
from recinfer.checkpoint import save_checkpoint
def work():
    full()
    save_checkpoint(path, torch.nn.Linear(30, 30))
""",
    "10-shards.yaml": """
from pathlib import Path
from recinfer.deploy.k8s import write_manifests
from tests.deploy.example import FOUND, OPTIONS
def work():
    full()
    write_manifests(FOUND, OPTIONS, Path(folder))
""",
}
PICTURES = ("curve.png", "latency.svg")


@pytest.mark.parametrize("name", WRITERS)
def test_the_error_names_the_file(tmp_path: Path, name: str) -> None:
    if name in PICTURES:
        pytest.importorskip("matplotlib", reason="matplotlib is not installed (the plot extra)")
    path = tmp_path / name
    program = f"from recinfer.errors import UnavailableError\n{LIMIT}{WRITERS[name]}{TRY}"
    code, out, err = run_program(program, tmp_path, path)
    assert code == 0, err
    named = str(tmp_path) if name.endswith(".yaml") else str(path)  # manifests have names of their own
    assert named in out, (out, err)
