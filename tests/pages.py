"""Pages of the documentation as programs: their code blocks, from the first to the last, as one shell script.

Two HTML comments in a page say how it is run. ``<!-- not run: reason -->`` before a block leaves the block out.
``<!-- starts from: page.md -->`` says that the page begins in a folder with the files that another page leaves; any other
page begins in an empty folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.ports import held_port
from tests.warm_shell import warm_tools

__all__ = ["FRESH", "blocks", "finished", "run_page", "script_of", "shell_environment", "starts_from"]

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"(?:<!-- not run: (.*?) -->\n)?^```(\w+)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
_CHANGES = {
    # Fewer rows, and longer timeouts for a busy machine than a reader needs. No page has this number itself: a checkpoint of another
    # number of rows is another model, and must stay one.
    "--limit 20000": "--limit 2500",
    "--wait 60": "--wait 600",
    "wait_until_ready(60)": "wait_until_ready(600)",
}
_PORTS = ("8500", "8501", "9500")
FRESH = {"README.md"}
"""Pages whose commands start as a reader's do, from nothing: by day the others run in processes that are forked with what takes long
to import, and would not show an import that is missing."""


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return [found[3] for found in _BLOCK.finditer(page.read_text()) if found[2] == language]


def starts_from(page: Path) -> Path | None:
    """The page whose files a page needs; None: it begins in an empty folder."""
    found = re.search(r"<!-- starts from: (\S+) -->", page.read_text())
    return (page.parent / found[1]).resolve() if found else None


def script_of(page: Path) -> tuple[str, list[str]]:
    """The page's bash and Python blocks as a bash script, and "page: reason" of each block that is not run.

    A Python block runs in an interpreter of its own; one that begins with ``# name.py`` becomes that file.
    """
    text = page.read_text()
    script, skipped = [], []
    for found in _BLOCK.finditer(text):
        reason, language, code = found.groups()
        if language not in ("bash", "python"):
            continue
        if reason:
            skipped.append(f"{page.name}: {reason}")
            continue
        line = text.count("\n", 0, found.start(2)) + 1
        script.append(f"echo '== {page.name}:{line}' | tee /dev/stderr\n")
        if language == "python":
            name = re.match(r"# (\w+\.py)\n", code)
            command = f"cat > {name[1]}" if name else "python -"
            code = f"{command} <<'END_OF_BLOCK'\n{code}END_OF_BLOCK\n"
        script.append(code)
    return "".join(script), skipped


def shell_environment(folder: Path, beside: str = "", fresh: bool = False) -> dict[str, str]:
    """An environment in which `recinfer` is this source tree's, installed or not, and `python` runs this interpreter.

    ``beside``: a folder of further packages, looked at last. Without it both are forked from a warm interpreter, unless ``fresh``.
    """
    if not (beside or fresh):
        return {**os.environ, "PATH": f"{warm_tools()}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    tools = folder / "bin"
    tools.mkdir()
    for name, module in (("recinfer", " -m recinfer"), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{module} "$@"\n')
        (tools / name).chmod(0o755)
    packages = [str(ROOT)]
    if beside:  # at the end of the path, which PYTHONPATH cannot say
        packages.append(str(folder / "beside"))
        (folder / "beside").mkdir()
        (folder / "beside/sitecustomize.py").write_text(f"import sys\nsys.path.append({beside!r})\n")
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(packages)}


def run_page(
    script: str,
    folder: Path,
    changes: Mapping[str, str] | None = None,
    *,
    beside: str = "",
    begin: Path | None = None,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a script in the new folder ``folder/work``; processes that it leaves in the background are ended.

    Args:
        changes: text of the script -> what is run instead, besides what all pages have changed: ports that are free, fewer
            rows, longer waits.
        begin: a folder whose files are there when the script begins; None: none are.
        fresh: each command starts from nothing.
    """
    with contextlib.ExitStack() as stack:
        ports = {port: str(stack.enter_context(held_port())) for port in _PORTS}
        changes = {**_CHANGES, **ports, **(changes or {})}
        # All in one pass: a replacement may itself contain a text to be replaced.
        script = re.sub("|".join(map(re.escape, changes)), lambda found: changes[found[0]], script)
        work = folder / "work"
        if begin is None:
            work.mkdir(parents=True)
        else:
            shutil.copytree(begin, work)
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", "trap 'kill -9 $(jobs -p) 2>/dev/null || true' EXIT\n" + script],
            cwd=work,
            env=shell_environment(folder, beside, fresh),
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def finished(page: Path, shared: Path, *, fresh: bool = False) -> tuple[Path, str]:
    """The folder in which a page's blocks were run, and what they printed. Must not be changed: copy it.

    Pages that start from the same page share one run of it, over the processes of a test run.

    Args:
        shared: a folder that all processes of the test run have.
        fresh: commands start from nothing, also where the page is not one of ``FRESH``.

    Raises:
        AssertionError: with the end of what was printed, if a command failed.
    """
    before = starts_from(page)
    begin = finished(before, shared, fresh=fresh)[0] if before else None
    home = shared / f"page-{page.stem}"
    with _locked(shared / f"{home.name}.lock"):
        if not (home / "printed").exists():
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir()
            done = run_page(script_of(page)[0], home, begin=begin, fresh=fresh or page.name in FRESH)
            assert done.returncode == 0, f"{page.name}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            (home / "printed").write_text(done.stdout)
    return home / "work", (home / "printed").read_text()
