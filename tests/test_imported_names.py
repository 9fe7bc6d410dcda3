"""Names that programs written for TorchRec import exist in recinfer, and importing the packages stays light.

``imported_names.json`` is the list, by our names: what the DLRM programs of facebookresearch and MLPerf, TorchRec's own
examples, TorchEasyRec, generative-recommenders and NVIDIA's recsys-examples import of it, as far as we have it.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import recinfer
import recinfer.distributed

NAMES: list[str] = json.loads(Path(__file__).with_name("imported_names.json").read_text())


def test_every_name_that_programs_import_is_here() -> None:
    missing = []
    for name in NAMES:
        module, _, attribute = name.rpartition(".")
        try:
            if not hasattr(importlib.import_module(module), attribute):
                importlib.import_module(name)
        except ImportError:
            missing.append(name)
    assert not missing


@pytest.mark.parametrize("package", ["recinfer", "recinfer.distributed", "recinfer.distributed.planner"])
def test_the_lazy_names_resolve_to_what_their_module_defines_and_are_listed(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        assert getattr(value, "__name__", name) in (name, "DataType", "Rect")  # which have second names
    assert set(module.__all__) <= set(dir(module))
    assert not {"TYPE_CHECKING", "annotations", "lazy_names"} & set(dir(module))
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = module.nothing


def test_one_class_has_one_identity_at_all_its_places() -> None:
    from recinfer.distributed.embeddingbag import EmbeddingBagCollection
    from recinfer.distributed.planner.types import ShardingPlan
    from recinfer.distributed.types import DataType, Multistreamable
    from recinfer.distributed.types import ShardingPlan as OfTypes
    from recinfer.types import DataType as OfTop

    assert EmbeddingBagCollection is recinfer.EmbeddingBagCollection
    assert ShardingPlan is OfTypes
    assert DataType is OfTop is recinfer.DataType
    assert Multistreamable is recinfer.Multistreamable
    assert recinfer.distributed.ShardingEnv is importlib.import_module("recinfer.distributed.types").ShardingEnv


def test_importing_the_packages_loads_no_torch_and_submodules_are_reachable() -> None:
    code = (
        "import sys, recinfer, recinfer.distributed, recinfer.distributed as d\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
        "dir(recinfer), dir(d)\n"
        "assert 'torch' not in sys.modules\n"
        "print(recinfer.fx.symbolic_trace, recinfer.distributed.planner.ParameterConstraints, recinfer.types.DataType)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "symbolic_trace" in done.stdout
