"""The parts of recinfer that are compiled, and the page of the package index; everything else is in pyproject.toml."""

from __future__ import annotations

import re
import sysconfig
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, ExecError, LinkError

HERE = Path(__file__).resolve().parent
# Rounding must stay IEEE's, so no fused multiply-add that nobody asked for; the rest lets loops with rintf become vectors.
FLAGS = ["-O3", "-std=gnu11", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
# GCC's: loops over a row's floats must not become memset and memcpy, whose copies by bytes start slowly.
KEEP_LOOPS = "-fno-tree-loop-distribute-patterns"


def extension(source: Path) -> Extension:
    """The module of one source file; with Python's limited API, so that one build serves Python 3.11 and all later ones."""
    path = source.relative_to(HERE)
    return Extension(
        ".".join(path.with_suffix("").parts),
        [str(path)],
        depends=[str(header.relative_to(HERE)) for header in sorted(HERE.glob("recinfer/**/*.h"))],
        py_limited_api=True,
        extra_compile_args=[*FLAGS],
    )


class BuildExt(build_ext):
    """Says, after whatever the compiler said, what is missing and which package brings it."""

    def build_extension(self, ext: Extension) -> None:
        """Compile one."""
        if self._compiles("int main(void) { return 0; }\n", KEEP_LOOPS):
            ext.extra_compile_args.append(KEEP_LOOPS)
        try:
            super().build_extension(ext)
        except (CompileError, ExecError, LinkError, OSError) as error:
            raise SystemExit(f"error: {self._why(ext, error)}") from None

    def _why(self, ext: Extension, error: Exception) -> str:
        compiler = self.compiler.compiler[0] if getattr(self.compiler, "compiler", None) else "cc"
        if not self._compiles("int main(void) { return 0; }\n"):
            return (
                f"recinfer needs a C compiler, and {compiler!r} compiles nothing here. Install one (Debian and Ubuntu: "
                "apt install build-essential; Fedora: dnf install gcc), or name yours in the environment variable CC."
            )
        if not self._compiles("#include <Python.h>\n"):
            return (
                f"recinfer needs Python's C headers: Python.h is not in {sysconfig.get_path('include')}. Install them "
                "(Debian and Ubuntu: apt install python3-dev; Fedora: dnf install python3-devel), for the Python that you use."
            )
        return f"{ext.sources[0]} was not compiled by {compiler!r}; what it said is above ({error})."

    def _compiles(self, code: str, *flags: str) -> bool:
        probe = Path(self.build_temp, "probe.c")
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text(code)
        try:
            self.compiler.compile(
                [str(probe)], output_dir=self.build_temp, include_dirs=self.include_dirs, extra_postargs=list(flags)
            )
        except (CompileError, ExecError, OSError):
            return False
        return True


def index_page(readme: str, repository: str | None) -> str:
    """The README for a package index, where relative links lead nowhere.

    Links and pictures lead to ``repository``. Without one, links keep their text alone and pictures are left out.
    """

    def replaced(found: re.Match[str]) -> str:
        picture, text, target = found.groups()
        if target.startswith(("http://", "https://", "#")):
            return found[0]
        if not repository:
            return "" if picture else text
        return f"{picture}[{text}]({repository.rstrip('/')}/{'raw' if picture else 'blob'}/HEAD/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", replaced, readme)


URLS = tomllib.loads((HERE / "pyproject.toml").read_text())["project"].get("urls", {})

setup(
    long_description=index_page((HERE / "README.md").read_text(), URLS.get("Repository")),
    long_description_content_type="text/markdown",
    cmdclass={"build_ext": BuildExt},
    ext_modules=[extension(source) for source in sorted(HERE.glob("recinfer/**/*.c"))],
    # One wheel for Python 3.11 and later: what Py_LIMITED_API says in the sources.
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
