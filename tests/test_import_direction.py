"""Imports point one way: every import statement of the package is read, also those inside functions."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from pathlib import Path

from tests.sources import nodes_of, tree_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "recinfer"

# A module belongs to the longest prefix it matches. A layer may import itself and what ALLOWED names, nothing else.
BASE = {
    "archive.part",
    "arrow",
    "columns",
    "errors",
    "excerpts",
    "env",
    "fbgemm",
    "files",
    "group_device",
    "ignored",
    "lazy",
    "lru",
    "module_tree",
    "printed",
    "sizes",
    "streamable",
    "threads",
    "version",
    "vocabulary.table",
}
MODEL_CODE = BASE | {"sparse", "modules", "modules.plain_tables", "modules.remapping"}
ROW_FORMATS = {"quant.formats"}  # sizes and cuts of rows, for all code that plans or stores them
RECT = {"layout.rect"}  # plain numbers, for all code that uses positions in tables
LAYOUT = RECT | ROW_FORMATS | {"layout"}
BELOW_PLANNING = MODEL_CODE | LAYOUT | {"distributed.types", "distributed.planner.constants"}
PLANNER = {f"distributed.planner.{part}" for part in ("constants", "model", "plan", "solve")}
PLAN_CODE = BELOW_PLANNING | PLANNER | {"distributed.planner"}
RUNTIME = PLAN_CODE | {"quant", "optim", "distributed"}
VOCABULARY = {
    f"vocabulary.{part}" for part in ("_index", "_strings", "index", "info", "table")
}  # data and files of vocabularies
SERVED = RUNTIME | {"models", "data", "capture", "checkpoint", "archive", "inference"}
SERVING = {"serving", "remote"} | {
    f"serving.{part}" for part in ("wire", "engine", "client", "shards", "server", "workers")
}
ALLOWED: dict[str, set[str]] = {
    "arrow": {"errors"},
    "columns": {"arrow", "errors"},
    "errors": set(),
    "excerpts": set(),
    "env": {"errors"},
    "fbgemm": {"errors"},
    "files": {"errors"},
    "group_device": {"env", "errors"},
    "ignored": set(),
    "lazy": set(),
    "lru": set(),
    "module_tree": set(),
    "printed": set(),
    "sizes": set(),
    "streamable": {"errors"},
    "threads": set(),
    "version": set(),
    "vocabulary._index": set(),  # compiled
    "vocabulary._strings": set(),  # compiled
    "vocabulary.index": {"errors", "vocabulary._index", "vocabulary.table"},
    "vocabulary.info": {"errors", "excerpts", "archive.part", "vocabulary.table"},
    "vocabulary.table": {"errors", "excerpts"},
    "archive.part": set(),  # the base of what id steps keep in archives
    "capture": set(),  # usable as a single file
    "migrate": {"errors", "files"},
    "sparse": BASE,
    "modules": BASE | {"sparse"},
    "modules.plain_tables": BASE | {"sparse", "modules", "capture"},
    "modules.remapping": BASE | {"sparse", "modules", "capture"},
    "data": BASE | {"sparse"},
    "datasets": BASE | {"sparse", "data"},
    "models": MODEL_CODE,
    "types": MODEL_CODE,
    "cli.options": {"errors"},
    "layout.rect": {"errors"},
    "layout": MODEL_CODE | RECT | ROW_FORMATS,
    "distributed.types": MODEL_CODE | RECT,
    "distributed.planner.constants": {"distributed.types"},
    "distributed.planner.model": BELOW_PLANNING,
    "distributed.planner.plan": BELOW_PLANNING | {"distributed.planner.model"},
    "distributed.planner.solve": BELOW_PLANNING | {"distributed.planner.model", "distributed.planner.plan"},
    "distributed.planner": BELOW_PLANNING | PLANNER,
    "quant._rows": set(),  # compiled
    "quant.formats": MODEL_CODE | {"quant._rows"},
    "quant": MODEL_CODE | RECT | ROW_FORMATS | {"quant._rows"},
    "optim": MODEL_CODE,
    "distributed": RUNTIME,
    "fx": RUNTIME,
    "checkpoint": RUNTIME | {"models", "data", "capture"},
    "archive": RUNTIME | {"models", "data", "capture", "checkpoint", "vocabulary.info"},
    "vocabulary": RUNTIME | VOCABULARY | {"archive", "capture", "checkpoint", "data"},
    "inference": RUNTIME | {"models", "data", "capture", "checkpoint", "archive", "vocabulary", "remote"},
    "remote": SERVED - {"inference"},
    "training": RUNTIME | {"models", "data", "checkpoint"},
    "vocabulary.comparison": RUNTIME | {"models", "data", "checkpoint", "training"},
    "vocabulary.options": {"cli.options", "data", "errors", "vocabulary.comparison"},
    "serving.wire": SERVED,
    "serving.engine": SERVED | {"remote", "serving.wire"},
    "serving.client": SERVED | {"serving.wire"},
    "serving.shards": SERVED | {"remote", "serving.wire", "serving.engine"},
    "serving.server": SERVED | {"serving.wire", "serving.engine", "serving.shards"},
    "serving.workers": SERVED | {"serving.wire", "serving.engine", "serving.server"},
    "serving.config": {"env", "errors", "archive", "remote", "serving.wire", "serving.engine", "serving.server"},
    "serving.app": SERVED | SERVING | {"serving.config"},
    "serving": SERVED | SERVING,
    "sizing": SERVED | SERVING,
    "deploy": SERVED | SERVING | {"serving.config", "serving.app"},
    "api": SERVED | SERVING,
    "cli": SERVED
    | SERVING
    | {"serving.config", "serving.app", "training", "sizing", "deploy", "migrate"}
    | {"cli.options", "vocabulary.options"},
}


@functools.cache
def modules() -> dict[Path, ast.Module]:
    """Every module of the package that is written by hand, parsed once."""
    paths = sorted(p for p in PACKAGE.rglob("*.py") if not p.name.endswith("_pb2.py"))
    return {path: tree_of(path) for path in paths}


def dotted(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(name: str) -> str:
    """The longest layer that ``name`` (dotted, without ``recinfer.``) lies in; "" for the package itself."""
    matching = [known for known in ALLOWED if name == known or name.startswith(known + ".")]
    return max(matching, key=len, default="")


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name without ``recinfer.``) of every import of our own, ``from x import submodule`` included."""
    found = []
    for node in nodes_of(modules()[path]):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the whole name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found += [(node.lineno, n.partition(".")[2]) for n in names if n == "recinfer" or n.startswith("recinfer.")]
    return found


def test_imports_point_one_way() -> None:
    """The package itself and __main__ are the way in: they may name any layer."""
    owned = {path: own for path in modules() if (own := layer(dotted(path)))}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} ({own}) imports recinfer.{name}"
        for path, own in owned.items()
        for line, name in imports(path)
        if layer(name) not in ALLOWED[own] | {own, ""}
    ]
    assert len(owned) > 400
    assert not wrong, "\n".join(wrong)


NAMES_OF_VOCABULARIES = re.compile(r"vocabular|managed.?collision|mch_|\bzch|mc_modules|mc_embedding", re.IGNORECASE)
OF_TORCHREC = re.compile(
    r"(modules|distributed)/(hash_)?mc_\w+\.py|quant/embedding_modules\.py"
)  # modules under its names
NAMING_VOCABULARIES = {
    "archive/id_parts.py": "the keys of manifest.json and delta.json",
    "capture.py": "finds the modules and reads their settings, as a single file in an environment without recinfer",
    "cli/id_options.py": "the options of commands",
    "inference/delta.py": "the public argument of make_delta, and the call that compares",
    "inference/export.py": "the public argument of export_archive, and the call that writes",
    "inference/id_steps.py": "the steps, their metrics, what inspect shows, and the rows of strings",
    "migrate/absent.py": "names of TorchRec that recinfer lacks",
    "modules/remapping.py": "the modules of a model: how they are found, their settings as plain data, their sharders",
}
"""The files that know of vocabularies, with what they have of them; docs/explanation/architecture.md names them as places to register."""


def test_eight_files_name_vocabularies() -> None:
    """An id step is a folder that registers in few places; every other file loops over what is registered there."""
    sources = [p for kind in ("py", "pyi", "c", "h") for p in PACKAGE.rglob(f"*.{kind}") if "_pb2" not in p.name]
    naming = {
        path.relative_to(PACKAGE).as_posix() for path in sources if NAMES_OF_VOCABULARIES.search(path.read_text())
    }
    # A feature contract had vocabularies of its own before; recinfer/data knows these alone.
    own = {name for name in naming if name.startswith(("vocabulary/", "data/")) or OF_TORCHREC.fullmatch(name)}
    assert naming - own == set(NAMING_VOCABULARIES)


def test_the_layers_themselves_have_no_cycle() -> None:
    """The table above may not allow what the design forbids: following it never leads back to the start."""
    # `distributed` names its own parts: that its runtime uses its planner and not the reverse is checked above.
    graphlib.TopologicalSorter({name: below - {name} for name, below in ALLOWED.items()}).prepare()


def test_training_is_not_imported_by_what_serves() -> None:
    assert not any("training" in ALLOWED[name] for name in ("archive", "inference", "serving"))


def test_one_file_imports_the_tbe_classes() -> None:
    using = [
        str(path.relative_to(PACKAGE))
        for path in modules()
        for node in nodes_of(modules()[path])
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fbgemm_gpu.split_table_batched")
    ]
    assert set(using) <= {"quant/tbe.py", "distributed/tables/cuda.py"}


def test_the_environment_is_read_in_one_file() -> None:
    using = set()
    for path in modules():
        for node in nodes_of(modules()[path]):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
                using.add(str(path.relative_to(PACKAGE)))
    assert using <= {"env.py"}


def test_every_module_opens_with_a_sentence() -> None:
    without = [
        str(p.relative_to(ROOT)) for p, parsed in modules().items() if not (ast.get_docstring(parsed) or "").strip()
    ]
    assert not without, f"modules with no docstring: {without}"


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_importing_recinfer_is_light() -> None:
    loaded = loaded_after("import recinfer")
    assert not loaded & {"torch", "numpy", "grpc", "fbgemm_gpu", "onnxruntime", "typer"}


def test_importing_the_command_line_is_light() -> None:
    loaded = loaded_after("import recinfer.cli.main")
    assert not loaded & {"torch", "numpy", "grpc", "fbgemm_gpu", "onnxruntime"}


def test_planning_and_clients_need_no_kernels() -> None:
    planning = "recinfer.distributed.planner.plan, recinfer.distributed.planner.sharding_planner"
    loaded = loaded_after(f"import {planning}, recinfer.serving.client.client, recinfer.serving.client.admin")
    assert "fbgemm_gpu" not in loaded
    quant = {name for name in loaded if name.startswith("recinfer.quant.")}
    assert all(name.startswith("recinfer.quant.formats") for name in quant)


def test_a_server_loads_no_optimizers_and_no_planner_and_starts_no_process_group_and_no_cuda() -> None:
    """torch.distributed.optim compiles its own as it is imported: with DTensor, a fifth of a server's start."""
    code = (
        "import recinfer.inference.predictor, recinfer.serving.server.server, recinfer.serving.server.shard_server, sys, torch\n"
        "assert not torch.distributed.is_initialized()\n"
        "assert not torch.cuda.is_initialized()\n"
        "parts = {'recinfer.optim', 'recinfer.checkpoint', 'torch.distributed.optim', 'torch.distributed.tensor'}\n"
        "assert not {*parts, 'recinfer.distributed.planner.sharding_planner'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
