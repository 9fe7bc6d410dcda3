"""Tests one wheel with several Pythons: builds it once, installs it into a virtual environment of each and runs it.

    python tools/try_pythons.py python3.12 python3.13
    TORCH_PIP_ARGS="--index-url ..." python tools/try_pythons.py python3.12     # as make's
    python tools/try_pythons.py --without-torch python3.13                      # the compiled parts alone

It tests that the compiled modules load and work, then runs ``recinfer demo``, which trains, plans, exports, verifies
and serves a small model. torch and FBGEMM are downloaded, of the releases that pyproject.toml names.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENT = re.compile(r'^ *"(torch==[^"]*)"', re.MULTILINE)

# Loaded from their files: the packages around them import torch. Rows of two columns, 8 bits: fp16 scale and bias, codes.
CHECK = """
import importlib.machinery, importlib.util, sys, sysconfig
from pathlib import Path
import numpy as np
import recinfer

paths = sorted(Path(recinfer.__file__).parent.rglob("_*.abi3.so"))
assert paths
for path in paths:
    module = path.name.partition(".")[0]
    loader = importlib.machinery.ExtensionFileLoader(module, str(path))
    found = importlib.util.module_from_spec(importlib.util.spec_from_file_location(module, path, loader=loader))
    loader.exec_module(found)
    if module == "_rows":  # 3: INT8 rows (_row.h)
        weights, rows = np.array([[0, 255], [1, 511]], np.float32), np.zeros((2, 6), np.uint8)
        found.pack_rows(weights, rows, 3, np.zeros(2, np.int32), 0.0, 0.0)
        assert rows[:, :4].view(np.float16).tolist() == [[1, 0], [2, 1]], rows
        assert rows[:, 4:].tolist() == [[0, 255], [0, 255]], rows
    if module == "_wire":
        assert found.read_request(b"not a request") is None
print(f"Python {sys.version.split()[0]}: {', '.join(path.name for path in paths)} load; rows are packed as they should be")
"""


def run(*command: str | Path) -> None:
    """Run a command; exits if it fails."""
    print("+", shlex.join(map(str, command)), flush=True)
    done = subprocess.run(list(map(str, command)), cwd=tempfile.gettempdir(), check=False)
    if done.returncode:
        sys.exit(f"try_pythons: {command[0]} ended with exit code {done.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("interpreters", nargs="+", help="Pythons to try, as paths or commands")
    parser.add_argument("--without-torch", action="store_true", help="test only the compiled modules, with numpy")
    options = parser.parse_args()
    torch_args = shlex.split(os.environ.get("TORCH_PIP_ARGS", ""))
    (torch,) = set(REQUIREMENT.findall((ROOT / "pyproject.toml").read_text()))
    pip = ("-m", "pip", "--disable-pip-version-check")
    with tempfile.TemporaryDirectory(prefix="recinfer-pythons-") as folder:
        run(sys.executable, *pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
        (wheel,) = Path(folder).glob("*.whl")
        print(f"built by Python {sys.version.split()[0]}: {wheel.name}")
        for number, interpreter in enumerate(options.interpreters):
            venv = Path(folder, f"venv-{number}")
            run(interpreter, "-m", "venv", venv)
            python = venv / "bin/python"
            if options.without_torch:
                run(python, *pip, "install", "--quiet", "--no-deps", wheel, "numpy>=2.0")
                run(python, "-c", CHECK)
                continue
            run(python, *pip, "install", "--quiet", *torch_args, torch)
            run(python, *pip, "install", "--quiet", f"{wheel}[cpu,onnx,train]")
            run(python, "-c", CHECK)
            run(venv / "bin/recinfer", "demo", "--limit", "4000")


if __name__ == "__main__":
    main()
