"""The documentation is true: the code blocks of README, tutorials and how-tos run, links lead somewhere, names exist."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks import report_page
from recinfer.inference.id_steps import COUNTS
from tests.pages import blocks, finished, run_page, script_of, starts_from

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))  # programs, not a package
import docs_diagrams  # noqa: E402
import docs_reference  # noqa: E402

DOCS = ROOT / "docs"
GENERATED = {(DOCS / "reference" / name).resolve() for name in docs_reference.PAGES}
PAGES = [
    page
    for page in sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "recinfer/archive").glob("*.md")])
    if page.resolve() not in GENERATED
]
RUN = [page for page in PAGES if page.parent.name in ("tutorials", "how-to")]
ELSEWHERE = {"many-hosts.md", "torchrec-model.md"}
"""Tutorials that tests/serving/remote/test_docs.py and tests/test_coming_from_torchrec.py run."""
REASONS = ("needs ", "it installs packages", "takes minutes")
"""How the reasons begin for which a block is not run."""


def test_the_commands_and_the_example_of_the_readme_run(tmp_path: Path) -> None:
    script, skipped = script_of(ROOT / "README.md")
    done = run_page(script, tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    assert all("needs " in reason or "it installs" in reason for reason in skipped)
    assert done.stdout.endswith("torch.Size([1, 16]) torch.Size([1, 16])\n")
    (example,) = blocks(ROOT / "README.md", "python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 10


@pytest.mark.parametrize("page", [page for page in RUN if page.name not in ELSEWHERE], ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_in_order(
    page: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> None:
    """From an empty folder, or the files that the page it names leaves, with nothing but what the page says.

    At night each command is an interpreter of its own.
    """
    for needed in ("onnx", "aiohttp", "pyarrow", "tritonclient.grpc", "torchmetrics"):
        pytest.importorskip(needed)
    script, skipped = script_of(page)
    assert all(reason.partition(": ")[2].startswith(REASONS) for reason in skipped), skipped
    before = starts_from(page)
    assert before is None or f"({before.name if before.parent == page.parent else '../tutorials/' + before.name})" in (
        page.read_text()
    ), f"{page.name} needs the files of {before.name}, and does not link to it"
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    if script:
        _, printed = finished(page, shared, fresh=request.config.getoption("--full-matrix"))
        if page.name == "monitor.md":
            assert 'recinfer_requests_total{code="OK"' in printed


def test_every_code_block_of_a_run_page_is_fenced() -> None:
    for page in RUN:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        loose = [
            line for line in re.findall(r"^ {4}\S.*", prose, flags=re.M) if not re.search(r"^!!! ", prose, flags=re.M)
        ]
        assert not loose, f"{page.name} has an indented code block, which nothing runs: fence it with its language"


def test_the_readme_and_the_page_have_the_figures_of_the_data() -> None:
    """Every figure of the README's table is one of docs/benchmarks.json, which has the raw result of every run."""
    assert not report_page.stale(ROOT)
    sections = json.loads((ROOT / report_page.DATA).read_text())["sections"]
    assert list(sections) == ["lookup", "serving", "planner", "training", "scaleout", "context", "vocabulary"]
    assert all(section["runs"] and section["commands"] and section["date"] for section in sections.values())


def test_a_changed_figure_is_found(tmp_path: Path) -> None:
    for name in (report_page.DATA, report_page.PAGE, report_page.README):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    assert not report_page.stale(tmp_path)
    for name in (report_page.README, report_page.PAGE):
        page = tmp_path / name
        text = page.read_text()
        figure = re.findall(r"\d\.\d+ \(\d\.\d+-\d\.\d+\)", text)[0]
        page.write_text(text.replace(figure, "9.99" + figure[4:], 1))
        assert report_page.stale(tmp_path) == [name]
        page.write_text(text)


SPEED = re.compile(
    r"\d ?[uµ]s\b|\d times (?:faster|slower|the (?:speed|rate|time|throughput))"
    r"|\d (?:requests|lookups|predictions|samples|answers|calls) (?:per|a) second"
)


def test_speeds_are_on_the_benchmark_page_alone() -> None:
    """Decision records have the figures of their day; the README has a table that is made from the data."""
    for page in PAGES:
        if page.parent.name == "decisions" or page == ROOT / report_page.PAGE:
            continue
        before, _, rest = page.read_text().partition(report_page.BEGIN)
        text = before + rest.partition(report_page.END)[2]
        assert not SPEED.findall(text), f"{page.relative_to(ROOT)}: link to {report_page.PAGE} instead"


def test_the_pictures_are_those_of_their_sources() -> None:
    assert not docs_diagrams.stale()


def test_the_reference_has_every_command_call_and_metric(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    docs_reference.write(tmp_path)
    commands = (tmp_path / "command-line.md").read_text()
    verbs = {p.stem for p in (ROOT / "recinfer/cli").glob("*.py") if "\nNAME = " in p.read_text()}
    assert all(f"## `recinfer {verb}" in commands for verb in verbs)
    grpc = (tmp_path / "grpc.md").read_text()
    for proto in docs_reference.PROTOS:
        text = (ROOT / "proto" / proto).read_text()
        assert all(f"### {name}\n" in grpc for name in re.findall(r"^message (\w+)", text, flags=re.M))
        assert all(f"`{name}`" in grpc for name in re.findall(r"^  rpc (\w+)", text, flags=re.M))
    source = (ROOT / "recinfer/serving/server/telemetry/prometheus.py").read_text()
    metrics = (tmp_path / "metrics.md").read_text()
    assert all(f"`{name}" in metrics for name in re.findall(r'"(recinfer_\w+)"', source))
    assert all(f"`{count.metric}_total`" in metrics for count in COUNTS.values())


def test_sphinx_marks_of_docstrings_become_markdown() -> None:
    pytest.importorskip("griffe")
    from docs_docstrings import markdown_of

    text = "See :func:`recinfer.load` and :class:`~recinfer.a.B`.\n\nExample::\n\n    load(x[::2])\n"
    assert markdown_of(text) == "See `load` and `B`.\n\nExample:\n\n    load(x[::2])\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
    there = [(t, (page.parent / t).resolve()) for t in targets if not t.startswith("http")]
    missing = [t for t, path in there if not path.exists() and path not in GENERATED]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_make_targets_and_verbs_named_in_the_docs_exist(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"(?:^ {4}|`)make ([a-z-]+)", text, flags=re.MULTILINE)) <= targets
    verbs = {p.stem for p in (ROOT / "recinfer/cli").glob("*.py") if "\nNAME = " in p.read_text()}
    assert set(re.findall(r"(?:^ {4}|`)recinfer ([a-z]+)", text, flags=re.MULTILINE)) <= verbs


def test_the_readme_lists_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| (`[a-z`, ]+) \|", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall(r"[a-z]+", row)) == sorted(extras)


def names_in(path: Path) -> set[str]:
    """Dotted names that a module defines: classes, functions, methods, constants."""
    found: set[str] = set()

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + child.name)
                walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.AnnAssign | ast.Assign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                found.update(prefix + t.id for t in targets if isinstance(t, ast.Name))

    walk(ast.parse(path.read_text()), "")
    return found


def test_the_tour_names_what_exists() -> None:
    text = (ROOT / "docs/explanation/request.md").read_text()
    steps = re.findall(r"^## (\d)\.", text, flags=re.MULTILINE)
    assert steps == list("12345678")
    mentioned = re.findall(r"`([\w/.-]+/[\w.-]*)(?::([\w.]+))?`", text)
    assert len(mentioned) > 20
    for path, name in mentioned:
        assert (ROOT / path).exists(), f"docs/explanation/request.md names {path}, which does not exist"
        if name:
            assert name in names_in(ROOT / path), (
                f"docs/explanation/request.md names {name} in {path}, which does not define it"
            )


def test_no_page_names_this_machine() -> None:
    here = str(ROOT.parent) + "/"
    pages = [*PAGES, ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci/run"]
    assert not [str(page) for page in pages if here in page.read_text()]
