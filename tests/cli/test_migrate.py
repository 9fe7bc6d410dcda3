"""``recinfer migrate``: what it changes in a file and what it leaves, which names it lists, and when it writes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recinfer.errors import InputError, NotFoundError
from recinfer.migrate import migrate_file
from recinfer.migrate.absent import INSTEAD
from recinfer.migrate.names import instead_of, is_here
from tests.cli.test_main import invoke

PROGRAM = '''\
"""A program for torchrec."""
import os, torchrec   # torchrec stays in comments
import torchrec.distributed.comm
import torchrec.sparse.jagged_tensor as jt
from torchrec \\
    import EmbeddingBagCollection
from torchrec.modules.embedding_configs import (
    EmbeddingBagConfig as Config,  # one table
    PoolingType,
)
from .torchrec import own
try:
    from torchrec.metrics.recall import RecallMetric
except ImportError:
    torchrec_is_old = "see torchrec's page"

def build(x: "torchrec.KeyedTensor") -> torchrec.modules.mlp.MLP:
    import torchrec.optim.keyed
    table = Config(name="torchrec.t", pooling=PoolingType.SUM, é=torchrec.PoolingType.MEAN)
    return jt.KeyedJaggedTensor.from_lengths_sync, jt.KeyedJaggedTensor.from_thin_air, jt.Elsewhere, x.torchrec, own
'''

MIGRATED = '''\
"""A program for torchrec."""
import os, recinfer   # torchrec stays in comments
import recinfer.distributed.comm
import recinfer.sparse.jagged_tensor as jt
from recinfer \\
    import EmbeddingBagCollection
from recinfer.modules.embedding_configs import (
    EmbeddingBagConfig as Config,  # one table
    PoolingType,
)
from .torchrec import own
try:
    from recinfer.metrics.recall import RecallMetric
except ImportError:
    torchrec_is_old = "see torchrec's page"

def build(x: "torchrec.KeyedTensor") -> recinfer.modules.mlp.MLP:
    import recinfer.optim.keyed
    table = Config(name="torchrec.t", pooling=PoolingType.SUM, é=recinfer.PoolingType.MEAN)
    return jt.KeyedJaggedTensor.from_lengths_sync, jt.KeyedJaggedTensor.from_thin_air, jt.Elsewhere, x.torchrec, own
'''


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


def test_imports_and_uses_change_and_nothing_else(tmp_path: Path) -> None:
    change = migrate_file(write(tmp_path / "program.py", PROGRAM))
    assert change.after == MIGRATED
    assert [(m.line, m.name) for m in change.missing] == [
        (13, "torchrec.metrics.recall.RecallMetric"),
        (20, "torchrec.sparse.jagged_tensor.Elsewhere"),
        (20, "torchrec.sparse.jagged_tensor.KeyedJaggedTensor.from_thin_air"),
    ]
    assert change.by_hand == ((17, "the string 'torchrec.KeyedTensor'"), (19, "the string 'torchrec.t'"))
    assert migrate_file(write(tmp_path / "program.py", change.after)).changed is False


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import torchrec as torchrec\ntorchrec.PoolingType", "import recinfer as torchrec\ntorchrec.PoolingType"),
        ("import torchrec as tr\ntr.PoolingType.SUM\n", "import recinfer as tr\ntr.PoolingType.SUM\n"),
        ("from torchrec.types import *\n", "from recinfer.types import *\n"),
        ("import torchrec\r\nx = torchrec.PoolingType\r\n", "import recinfer\r\nx = recinfer.PoolingType\r\n"),
        ("import torchrec; y = (torchrec\n  .PoolingType)", "import recinfer; y = (recinfer\n  .PoolingType)"),
        ("import torchrec_dlrm, my.torchrec\n", "import torchrec_dlrm, my.torchrec\n"),
        ("x = 1  # torchrec\n", "x = 1  # torchrec\n"),
    ],
)
def test_forms_of_import(before: str, after: str, tmp_path: Path) -> None:
    assert migrate_file(write(tmp_path / "program.py", before)).after == after


# fmt: off
ABSENT = "from recinfer.migrate.missing import absent_name"
STOOD_IN = [
    ("from torchrec.metrics.recall import RecallMetric as R  # why\n", f"{ABSENT}\nR = absent_name(\"metrics.recall.RecallMetric\")  # why\n"),
    ("from torchrec.types import DataType, Nothing", f"from recinfer.types import DataType\n{ABSENT}\nNothing = absent_name(\"types.Nothing\")"),
    ("from torchrec.types import Nothing, DataType as D\n", f"from recinfer.types import DataType as D\n{ABSENT}\nNothing = absent_name(\"types.Nothing\")\n"),
    (
        "def f():\n    from torchrec.types import (\n        Nothing,\n        DataType,  # é\n        Never,\n    )  # end\r\n    return Never\n",
        f"def f():\n    from recinfer.types import (\n        DataType,\n    )  # end\r\n    {ABSENT}\r\n    Nothing = absent_name(\"types.Nothing\")\r\n"
        "    Never = absent_name(\"types.Never\")\r\n    return Never\n",
    ),
    ("if True: from torchrec.types import Nothing\n", "if True: from recinfer.types import Nothing\n"),
    ("from torchrec.types import Nothing; x = 1\n", "from recinfer.types import Nothing; x = 1\n"),
]
# fmt: on


@pytest.mark.parametrize(("before", "after"), STOOD_IN)
def test_stand_ins_for_imports_of_missing_names(before: str, after: str, tmp_path: Path) -> None:
    change = migrate_file(write(tmp_path / "program.py", before))
    assert change.after == after
    assert {name.name.rpartition(".")[2] for name in change.missing} <= {"RecallMetric", "Nothing", "Never"}
    again = migrate_file(write(tmp_path / "program.py", after))
    assert (again.changed, again.by_hand) == (False, ())


def test_a_program_runs_until_it_uses_a_missing_name(tmp_path: Path) -> None:
    program = """
from typing import Optional
from torchrec.distributed.planner.enumerators import EmbeddingTower, ParameterConstraints
from torchrec.metrics.recall import RecallMetric

def is_tower(module: Optional[EmbeddingTower]) -> bool:
    return isinstance(module, EmbeddingTower)

class Mine(RecallMetric):
    kind = RecallMetric.kind
"""
    names: dict[str, Any] = {}
    exec(migrate_file(write(tmp_path / "program.py", program)).after, names)
    assert not names["is_tower"](3)
    assert names["ParameterConstraints"]
    text = r"torchrec.distributed.planner.enumerators.EmbeddingTower is not in recinfer; two modules: an EmbeddingBag"
    for use in (names["EmbeddingTower"], lambda: 2 * names["EmbeddingTower"], lambda: 3 in names["EmbeddingTower"]):
        with pytest.raises(NotFoundError, match=text):
            use()
    with pytest.raises(
        NotFoundError, match=r"torchrec\.metrics\.recall\.RecallMetric is not in recinfer; torchmetrics"
    ):
        names["Mine"]()
    with pytest.raises(
        NotFoundError, match=r"torchrec\.metrics\.recall\.RecallMetric\.kind is not in recinfer; torchmetrics"
    ):
        names["Mine"].kind()


def test_the_encoding_stays(tmp_path: Path) -> None:
    text = "# -*- coding: latin-1 -*-\nname = 'é'; import torchrec\n"
    path = write(tmp_path / "program.py", text, "latin-1")
    migrate_file(path).write()
    assert path.read_bytes() == text.replace("torchrec", "recinfer").encode("latin-1")
    with_mark = write(tmp_path / "marked.py", "import torchrec\n", "utf-8-sig")
    migrate_file(with_mark).write()
    assert with_mark.read_bytes() == "import recinfer\n".encode("utf-8-sig")
    with pytest.raises(InputError, match=r"broken\.py: cannot be parsed"):
        migrate_file(write(tmp_path / "broken.py", "import torchrec\nprint 'old'\n"))


def test_uses_in_f_strings_change_or_are_listed(tmp_path: Path) -> None:
    """Python before 3.12 reports no correct positions there."""
    change = migrate_file(write(tmp_path / "program.py", 'import torchrec\nf"{1}:{torchrec.PoolingType}"\n'))
    if "torchrec" in change.after:
        assert change.by_hand == ((2, "a use of torchrec whose position Python does not report"),)


def test_every_absent_name_is_absent() -> None:
    assert [name for name in INSTEAD if not name.endswith(".*") and is_here(name)] == []
    assert all(INSTEAD.values())
    name = "torchrec.datasets.utils.ParallelReadConcat"
    assert instead_of(name) == instead_of(f"{name}.datapipes") == INSTEAD[name]
    assert instead_of("torchrec.nowhere.At") == ""
    assert "torchmetrics" in instead_of("torchrec.metrics.recall.RecallMetric")


def test_nothing_is_written_without_the_write_option(tmp_path: Path) -> None:
    program = write(tmp_path / "program.py", "import torchrec\nkinds = torchrec.PoolingType\n")
    for folder in (".hidden", "venv", "lib/site-packages"):
        (tmp_path / folder).mkdir(parents=True)
        write(tmp_path / folder / "other.py", "import torchrec\n")
    write(tmp_path / "venv" / "pyvenv.cfg", "")
    code, out, _ = invoke("migrate", tmp_path)
    assert code == 0 and "import torchrec" in program.read_text()
    assert f"--- {program}\n+++ {program}\n@@ -1,2 +1,2 @@\n-import torchrec\n" in out
    assert out.endswith("1 of 1 files would change (--write does it); recinfer has every name\n")
    if patch := shutil.which("patch"):
        diff = out[: out.rindex("1 of 1")]
        subprocess.run([patch, "-p0", "--quiet", "-d", "/"], input=diff, text=True, check=True)
        assert program.read_text() == "import recinfer\nkinds = recinfer.PoolingType\n"


def test_missing_names_are_listed_and_the_files_written(tmp_path: Path) -> None:
    program = write(tmp_path / "program.py", "from torchrec.datasets.utils import Batch, ParallelReadConcat\n")
    broken = write(tmp_path / "broken.py", "import torchrec\nprint 'old'\n")
    code, out, err = invoke("migrate", tmp_path, "--write", "--json")
    assert code == 1
    said = json.loads(out.splitlines()[-1])
    name = "torchrec.datasets.utils.ParallelReadConcat"
    assert said["missing"] == [{"file": str(program), "line": 1, "name": name, "instead": INSTEAD[name]}]
    assert said["changed"] == [str(program)] and said["written"] and str(broken) in said["unread"][0]
    assert "files that could not be read: 1" in err
    assert program.read_text() == (
        f"from recinfer.datasets.utils import Batch\n{ABSENT}\n"
        'ParallelReadConcat = absent_name("datasets.utils.ParallelReadConcat")\n'
    )
    write(program, "from torchrec.nowhere import This\n")
    code, out, _ = invoke("migrate", program)
    assert code == 1
    assert f"{program}:1: torchrec.nowhere.This is not in recinfer; no replacement is known\n" in out
    code, _, err = invoke("migrate", tmp_path / "absent")
    assert code == 2 and "does not exist; expected a Python file or a folder" in err


def test_torchrec_itself_is_never_imported(tmp_path: Path) -> None:
    (tmp_path / "torchrec").mkdir()
    write(tmp_path / "torchrec" / "__init__.py", "raise SystemExit('torchrec was imported')\n")
    program = write(tmp_path / "program.py", PROGRAM)
    command = [sys.executable, "-m", "recinfer", "migrate", str(program)]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(command, cwd=root, env={"PYTHONPATH": f"{tmp_path}:{root}"}, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "torchrec was imported" not in done.stdout + done.stderr


def test_fbgemms_operators_need_an_import_of_their_own(tmp_path: Path) -> None:
    """``import torchrec`` loads them, and recinfer's modules do not before they need one."""
    lines = (
        "import torch\nfrom torchrec import KeyedJaggedTensor\n\nsums = torch.ops.fbgemm.asynchronous_complete_cumsum\n"
    )
    program = tmp_path / "program.py"
    program.write_text(lines)
    what = "torch.ops.fbgemm needs `import fbgemm_gpu`, which torchrec does by itself"
    assert migrate_file(program).by_hand == ((4, what),)
    program.write_text("import fbgemm_gpu\n" + lines)
    assert migrate_file(program).by_hand == ()


def test_a_folder_without_python_files_is_refused(tmp_path: Path) -> None:
    code, _, err = invoke("migrate", tmp_path)
    assert code == 2 and "has no .py file" in err
