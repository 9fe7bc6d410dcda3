"""Pages of the documentation as programs: their code blocks, from the first to the last, as one shell script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["NOT_RUN", "blocks", "run_page", "script_of", "shell_environment"]

ROOT = Path(__file__).resolve().parent.parent
NOT_RUN = "# Not run here: "
"""How a block begins that needs more than a test has; the rest of the line says what."""


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return [code for _, tag, code in _fenced(page) if tag == language]


def _fenced(page: Path) -> list[tuple[int, str, str]]:
    """Line, language and code of each fenced block."""
    text = page.read_text()
    found = re.finditer(r"^```(\w+)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, each.start()) + 1, each[1], each[2]) for each in found]


def script_of(page: Path, more: str = "") -> tuple[str, list[str]]:
    """The page's bash and Python blocks as a bash script, and why others are not in it.

    A Python block runs in an interpreter of its own; one that begins with ``# name.py`` becomes that file.
    """
    script, skipped = [more], []
    for line, language, code in _fenced(page):
        if language not in ("bash", "python"):
            continue
        if code.startswith(NOT_RUN):
            skipped.append(f"{page.name}:{line}: {code.splitlines()[0].removeprefix(NOT_RUN)}")
            continue
        script.append(f"echo '== {page.name}:{line}' | tee /dev/stderr\n")
        if language == "python":
            name = re.match(r"# (\w+\.py)\n", code)
            command = f"cat > {name[1]}" if name else "python -"
            code = f"{command} <<'END_OF_BLOCK'\n{code}END_OF_BLOCK\n"
        script.append(code)
    return "".join(script), skipped


def shell_environment(folder: Path, beside: str = "") -> dict[str, str]:
    """An environment in which `recinfer` is this source tree's, installed or not, and `python` runs this interpreter.

    ``beside``: a folder of further packages, looked at last.
    """
    tools = folder / "bin"
    tools.mkdir()
    for name, module in (("recinfer", " -m recinfer"), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{module} "$@"\n')
        (tools / name).chmod(0o755)
    paths = [str(ROOT)]
    if beside:  # at the end of the path, which PYTHONPATH cannot say
        (folder / "beside").mkdir()
        (folder / "beside/sitecustomize.py").write_text(f"import sys\nsys.path.append({beside!r})\n")
        paths.append(str(folder / "beside"))
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(paths)}


def run_page(
    script: str, folder: Path, changes: Mapping[str, str] | None = None, beside: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a script in an empty folder, with some of its text changed; whatever it leaves in the background is ended."""
    # At once: what a text is changed to may be another one that is to be changed.
    script = re.sub("|".join(map(re.escape, changes)), lambda found: changes[found[0]], script) if changes else script
    work = folder / "work"
    work.mkdir()
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "trap 'kill -9 $(jobs -p) 2>/dev/null || true' EXIT\n" + script],
        cwd=work,
        env=shell_environment(folder, beside),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
