"""The compiled modules: errors of a build that lacks something, the wheel's tag, and a tree that was never built."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import recinfer

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "recinfer").rglob("*.c"))
COMPILED = [str(path.relative_to(ROOT / "recinfer").with_suffix("")) for path in SOURCES]

# A compiler that does not find Python's headers, wherever they are.
NO_HEADERS = """#!/bin/bash
kept=()
for word in "$@"; do [[ $word == -I* ]] || kept+=("$word"); done
exec cc "${kept[@]}"
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what is built, as in a fresh clone."""
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    for name in ("recinfer", "handlers"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    return tree


def python(tree: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=kept | environment, capture_output=True, text=True, check=False
    )


def build(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return python(tree, "setup.py", "-q", "build_ext", "--build-lib", "lib", **environment)


def test_without_a_c_compiler_the_build_says_what_to_install(tree: Path) -> None:
    done = build(tree, CC="/nonexistent")
    assert done.returncode == 1 and not list(tree.rglob("*.so"))
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: recinfer needs a C compiler, and '/nonexistent' compiles nothing here.")
    assert "build-essential" in last and "dnf install gcc" in last and "Traceback" not in done.stderr


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_without_pythons_headers_the_build_says_what_to_install(tree: Path) -> None:
    compiler = tree / "cc"
    compiler.write_text(NO_HEADERS)
    compiler.chmod(0o755)
    done = build(tree, CC=str(compiler))
    assert done.returncode == 1 and not list(tree.rglob("*.so"))
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: recinfer needs Python's C headers: Python.h is not in ")
    assert "python3-dev;" in last and "python3-devel" in last and "Traceback" not in done.stderr


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_compile_error_is_not_reported_as_a_missing_compiler(tree: Path) -> None:
    (tree / "recinfer/quant/_rows.c").write_text("#include <Python.h>\nint mistake(\n")
    done = build(tree)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: recinfer/quant/_rows.c was not compiled by ")


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_one_wheel_serves_python_3_11_and_later(tree: Path) -> None:
    built = tree / f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}/recinfer"
    for name in COMPILED:  # what is there already and newer than its source is not compiled again
        (built / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / f"recinfer/{name}.abi3.so", built / f"{name}.abi3.so")
    done = python(tree, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "wheels", ".")
    assert done.returncode == 0, done.stderr
    (wheel,) = (tree / "wheels").iterdir()
    assert wheel.name.startswith(f"recinfer-{recinfer.__version__}-cp311-abi3-linux_")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (about,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
        assert b"Tag: cp311-abi3-linux_" in archive.read(about)
    libraries = [f"recinfer/{name}.abi3.so" for name in COMPILED]
    assert sorted(name for name in names if name.endswith(".so")) == libraries
    done = python(tree, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", "apart", str(wheel))
    assert done.returncode == 0, done.stderr
    place = "from recinfer.serving import mar; print(mar._handler())"
    assert python(tree / "apart", "-c", place).stdout.strip() == str(
        tree / "apart/share/recinfer/handlers/recinfer_handler.py"
    )


def test_no_link_of_the_package_index_page_leads_nowhere(tree: Path) -> None:
    def page() -> str:
        done = python(tree, "setup.py", "-q", "egg_info")
        assert done.returncode == 0, done.stderr
        return (tree / "recinfer.egg-info/PKG-INFO").read_text()

    relative = re.compile(r"\]\((?!https?://|#)")
    assert relative.search((tree / "README.md").read_text())
    assert "Description-Content-Type: text/markdown" in page()
    assert not relative.search(page()) and "Coming from TorchRec" in page()
    with (tree / "pyproject.toml").open("a") as file:
        file.write('\n[project.urls]\nRepository = "https://example.org/recinfer"\n')
    assert not relative.search(page())
    assert "](https://example.org/recinfer/blob/HEAD/docs/explanation/coming-from-torchrec.md)" in page()
    assert "](https://example.org/recinfer/raw/HEAD/docs/images/bench-serving.svg)" in page()


def test_the_triton_extra_allows_what_torch_of_pypi_brings() -> None:
    """torch 2.13.0's wheel for Linux on PyPI, a CUDA build, requires triton==3.7.1, so `make test` could not be installed beside it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert "torch==2.13.0" in extras["cpu"], "with another torch, write its wheel's Triton below"
    (triton,) = map(Requirement, extras["triton"])
    assert "3.7.1" in triton.specifier


def test_each_source_is_where_an_import_looks_for_it_and_uses_the_limited_api() -> None:
    assert len(SOURCES) > 6
    for path, name in zip(SOURCES, COMPILED):
        *folders, module = name.split("/")
        assert len(folders) in (1, 2) and module.startswith("_"), f"{path}: recinfer/compiled.py does not see it"
        text = path.read_text()
        assert text.index("#define Py_LIMITED_API 0x030B0000") < text.index("#include <Python.h>"), path


def test_a_source_tree_that_was_never_built_says_so_in_a_sentence(tree: Path) -> None:
    for program in ("import recinfer", "import recinfer.quant.packing"):
        done = python(tree, "-c", program)
        assert done.returncode == 1
        assert done.stderr.strip().splitlines()[-1] == (
            f"ImportError: recinfer in {tree} is a source tree that was not built (optim/_adagrad.c is not compiled): run "
            "`pip install -e .` there, or `make install`; that needs a C compiler and Python's headers."
        )
