"""The documentation is true: the README's commands and example run, links lead somewhere, the tour names what exists."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.pages import blocks, run_page, script_of
from tests.ports import held_port

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "recinfer/archive").glob("*.md")])


def test_the_commands_and_the_example_of_the_readme_run(tmp_path: Path) -> None:
    (commands,) = blocks(ROOT / "README.md", "bash")
    (example,) = blocks(ROOT / "README.md", "python")
    with held_port() as port, held_port() as http:
        changes = {"--limit 20000": "--limit 2000", "--wait 60": "--wait 600", "8500": str(port), "8501": str(http)}
        done = run_page(f"{commands}wait\npython - <<'END'\n{example}END\n", tmp_path, changes)
    assert done.returncode == 0, done.stderr
    assert "C1" in done.stdout
    assert done.stdout.endswith("torch.Size([1, 16]) torch.Size([1, 16])\n")
    assert len([line for line in example.splitlines() if line.strip()]) <= 10


def test_the_blocks_of_the_howto_run_in_order(tmp_path: Path) -> None:
    for needed in ("onnx", "aiohttp", "pyarrow", "matplotlib", "tritonclient.grpc", "torchmetrics"):
        pytest.importorskip(needed)
    script, skipped = script_of(ROOT / "docs/howto.md")
    assert [reason.partition(": ")[2] for reason in skipped] == ["needs torchrec.", "needs two hosts."]
    with held_port() as port, held_port() as http, held_port() as metrics:
        ports = {"8500": str(port), "8501": str(http), "9500": str(metrics)}
        done = run_page(
            script, tmp_path, ports | {"--wait 60": "--wait 600", "wait_until_ready(60)": "wait_until_ready(600)"}
        )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert 'recinfer_requests_total{code="OK"' in done.stdout
    assert not re.findall(
        r"^ {4}\S.*", re.sub(r"^```.*?^```", "", (ROOT / "docs/howto.md").read_text(), flags=re.M | re.S), flags=re.M
    ), "docs/howto.md has an indented code block, which nothing runs: fence it with its language"


@pytest.mark.parametrize("page", ["rest.md", "operate.md"])
def test_the_blocks_of_a_page_run_in_order(page: str, tmp_path: Path) -> None:
    for needed in ("onnx", "aiohttp", "torchmetrics"):
        pytest.importorskip(needed)
    script, skipped = script_of(ROOT / "docs" / page)
    assert not skipped
    with held_port() as port, held_port() as http:
        done = run_page(script, tmp_path, {"8500": str(port), "8501": str(http), "--wait 60": "--wait 600"})
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert {"rest.md": '"predictions"', "operate.md": "canary"}[page] in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
    missing = [t for t in targets if not t.startswith("http") and not (page.parent / t).exists()]
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
    text = (ROOT / "docs/tour.md").read_text()
    steps = re.findall(r"^## (\d)\.", text, flags=re.MULTILINE)
    assert steps == list("12345678")
    mentioned = re.findall(r"`([\w/.-]+/[\w.-]*)(?::([\w.]+))?`", text)
    assert len(mentioned) > 20
    for path, name in mentioned:
        assert (ROOT / path).exists(), f"docs/tour.md names {path}, which does not exist"
        if name:
            assert name in names_in(ROOT / path), f"docs/tour.md names {name} in {path}, which does not define it"


def test_no_page_names_this_machine() -> None:
    here = str(ROOT.parent) + "/"
    pages = [*PAGES, ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci/run"]
    assert not [str(page) for page in pages if here in page.read_text()]
