"""TorchRec's arguments without effect in recinfer: the list is complete, and each argument behaves as listed."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from recinfer.distributed.planner import ParameterConstraints, Topology
from recinfer.distributed.quant_embedding import ShardedQuantEmbeddingCollection
from recinfer.distributed.quant_embeddingbag import ShardedQuantEmbeddingBagCollection
from recinfer.distributed.types import KeyValueParams, ParameterSharding, ShardingEnv
from recinfer.distributed.types.edges import sharding_spec
from recinfer.errors import ConfigError
from recinfer.ignored import IGNORED, IgnoredArgumentWarning
from recinfer.layout.rect import Rect
from recinfer.modules.embedding_configs import BaseEmbeddingConfig, DataType, EmbeddingBagConfig, EmbeddingConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.quant.embedding_modules import EmbeddingBagCollection as QuantBags
from recinfer.quant.embedding_modules import EmbeddingCollection as QuantRows
from tests.sources import nodes_of, tree_of

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "recinfer"
NAMES: list[str] = sorted(
    {*json.loads((TESTS / "documented_api.json").read_text()), *json.loads((TESTS / "imported_names.json").read_text())}
)


def resolved(name: str) -> Any:
    """What a dotted name stands for: a module, class, function or method; None for what only instances have."""
    parts = name.split(".")
    for stop in range(len(parts), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:stop]))
        except ImportError:
            continue
        return functools.reduce(lambda got, part: getattr(got, part, None), parts[stop:], thing)
    raise AssertionError(name)


def plain(member: Any) -> Any:
    return getattr(member, "__func__", member)


def ours(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("recinfer")


def is_interface(cls: type, owner: type, name: str) -> bool:
    """Whether another class, above or below, has a method of this name: its parameters are then those of all of them.

    nn.Module is one of them for mixins of modules too."""
    below, others = [owner], {nn.Module, *cls.__mro__} - {owner}
    while below:
        found = [one for one in type.__subclasses__(below.pop()) if ours(one)]
        below += found
        others |= {*found}
    return any(name in vars(other) for other in others)


def is_empty(function: ast.FunctionDef) -> bool:
    """Whether the body is empty, as in an interface's method."""
    return all(
        isinstance(s, ast.Pass | ast.Raise) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
        for s in function.body
    )


def unread(function: Any, method: bool) -> set[str]:
    """Parameters that a function of ours does not read."""
    function = inspect.unwrap(function)
    if not ours(function):
        return set()
    try:
        node: Any = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except OSError:  # made by dataclasses
        return set()
    if method and is_empty(node):
        return set()
    arguments = node.args
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    used = {name.id for part in node.body for name in ast.walk(part) if isinstance(name, ast.Name)}
    return {a.arg for a in given if a is not None} - used - {"self", "cls"}


@functools.cache
def read_attributes() -> frozenset[str]:
    trees = [tree_of(path) for path in PACKAGE.rglob("*.py")]
    loads = (
        n for tree in trees for n in nodes_of(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)
    )
    return frozenset(node.attr for node in loads)


def owner_of_field(cls: type, name: str) -> type:
    return next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", {}))


def without_effect() -> dict[tuple[Any, str], str]:
    """(function, parameter) that it does not read, (dataclass, field) that nothing in the package reads -> a name of it."""
    result: dict[tuple[Any, str], str] = {}
    for name in NAMES:
        thing = resolved(name)
        if inspect.isfunction(thing):
            result |= {(thing, parameter): name for parameter in unread(thing, False)}
        if not inspect.isclass(thing) or not ours(thing):
            continue
        if dataclasses.is_dataclass(thing):
            silent = [f.name for f in dataclasses.fields(thing) if f.name not in read_attributes()]
            result |= {(owner_of_field(thing, field), field): name for field in silent}
        for base in filter(ours, thing.__mro__):
            for member, value in vars(base).items():
                own = member == "__init__" or not (member.startswith("__") or is_interface(thing, base, member))
                if own and inspect.isfunction(plain(value)):
                    of = name if member == "__init__" else f"{name}.{member}"
                    result |= {(plain(value), parameter): of for parameter in unread(plain(value), True)}
    return result


def listed() -> dict[tuple[Any, str], tuple[str, str]]:
    """The same of :data:`IGNORED`, -> (its name there, what happens)."""
    result: dict[tuple[Any, str], tuple[str, str]] = {}
    for row in IGNORED:
        for of, parameter in ((of, parameter) for of in row.of for parameter in row.parameters):
            thing = resolved(f"recinfer.{of}")
            names = [f.name for f in dataclasses.fields(thing)] if parameter == "*" else [parameter]
            for name in names:
                assert name in inspect.signature(thing).parameters, f"{of} has no parameter {name}"
                key = plain(thing)
                if dataclasses.is_dataclass(thing):
                    key = owner_of_field(thing, name)  # type: ignore[arg-type]
                elif inspect.isclass(thing):
                    key = thing.__init__
                # Classes of one row may share a constructor.
                assert (key, name) not in result or result[key, name][0] in row.of, f"{of}: {name} is listed twice"
                result[key, name] = of, row.happens
    return result


def test_every_argument_without_effect_is_listed() -> None:
    missing = {
        f"{name}: {parameter}"
        for (key, parameter), name in without_effect().items()
        if (key, parameter) not in listed()
    }
    assert not missing, (
        "give these an effect, or list them in recinfer/ignored.py and let them warn where something is lost"
    )


def whole(table: BaseEmbeddingConfig) -> dict[str, ParameterSharding]:
    """The plan of a quantized table that is whole on the one rank."""
    rect = Rect(0, 0, table.num_embeddings, 0, table.embedding_dim, table.name)
    return {table.name: ParameterSharding("table_wise", "quant", [0], sharding_spec([rect], ["rank:0/cpu"]))}


ONE = ShardingEnv.from_local(1, 0)
TABLES = [EmbeddingBagConfig(4, 4, "t", feature_names=["f"])]
ROWS = [EmbeddingConfig(4, 4, "t", feature_names=["f"])]
PACKED_BAGS = EmbeddingBagConfig(4, 4, "t", data_type=DataType.INT8, feature_names=["f"])
PACKED_ROWS = EmbeddingConfig(4, 4, "t", data_type=DataType.INT8, feature_names=["f"])
QUANT = "quant.embedding_modules."
CONFIG, TOPOLOGY = "modules.embedding_configs.BaseEmbeddingConfig", "distributed.planner.Topology"
# One call for each argument that warns or is refused.
CALLS: dict[tuple[str, str], Callable[[], object]] = {
    **{
        (f"{QUANT}EmbeddingBagCollection", name): lambda name=name: QuantBags(TABLES, False, **{name: True})
        for name in ("register_tbes", "quant_state_dict_split_scale_bias")
    },
    **{
        (f"{QUANT}EmbeddingCollection", name): lambda name=name: QuantRows(ROWS, **{name: True})
        for name in ("register_tbes", "quant_state_dict_split_scale_bias")
    },
    (f"{QUANT}EmbeddingBagCollection.from_float", "use_precomputed_fake_quant"): lambda: QuantBags.from_float(
        EmbeddingBagCollection(TABLES), True
    ),
    (f"{QUANT}EmbeddingCollection.from_float", "use_precomputed_fake_quant"): lambda: QuantRows.from_float(
        EmbeddingCollection(ROWS), True
    ),
    ("distributed.quant_embeddingbag.ShardedQuantEmbeddingBagCollection", "fused_params"): lambda: (
        ShardedQuantEmbeddingBagCollection(
            QuantBags([PACKED_BAGS], False), whole(PACKED_BAGS), ONE, {"register_tbes": True}
        )
    ),
    ("distributed.quant_embedding.ShardedQuantEmbeddingCollection", "fused_params"): lambda: (
        ShardedQuantEmbeddingCollection(QuantRows([PACKED_ROWS]), whole(PACKED_ROWS), ONE, {"register_tbes": True})
    ),
    (CONFIG, "num_embeddings_post_pruning"): lambda: EmbeddingBagConfig(4, 4, num_embeddings_post_pruning=2),
    ("distributed.types.KeyValueParams", "*"): lambda: KeyValueParams(ssd_storage_directory="/ssd"),
    (TOPOLOGY, "ssd_cap"): lambda: Topology(2, "cuda", ssd_cap=1 << 40),
    (TOPOLOGY, "ssd_mem_bw"): lambda: Topology(2, "cuda", ssd_mem_bw=1e6),
    (TOPOLOGY, "hbm_cap"): lambda: Topology(2, "cpu", hbm_cap=1 << 30),
    (TOPOLOGY, "pod_size"): lambda: Topology(2, "cuda", pod_size=2),
    **{
        (CONFIG, name): lambda name=name: EmbeddingConfig(4, 4, **{name: 2})
        for name in (
            "input_dim",
            "total_num_buckets",
            "use_virtual_table",
            "virtual_table_eviction_policy",
            "enable_embedding_update",
            "stash_weights",
        )
    },
    ("distributed.planner.ParameterConstraints", "use_virtual_table"): lambda: ParameterConstraints(
        use_virtual_table=True
    ),
}
SAID = [
    (of, p, row.happens, row.why)
    for row in IGNORED
    for of in row.of
    for p in row.parameters
    if row.happens != "nothing"
]


@pytest.mark.parametrize(("of", "parameter", "happens", "why"), SAID, ids=lambda value: str(value)[:40])
def test_arguments_without_effect_warn_or_are_refused(of: str, parameter: str, happens: str, why: str) -> None:
    call = CALLS[of, parameter]
    if happens == "refused":
        with pytest.raises(ConfigError, match=f"{parameter}=.*all (its )?rows"):
            call()
        return
    with pytest.warns(IgnoredArgumentWarning) as caught:
        call()
    (one,) = caught
    assert one.filename == __file__  # the place is the program's
    assert of in str(one.message) and why in str(one.message) and (parameter == "*" or parameter in str(one.message))


def test_it_is_said_once_a_place_and_only_when_given() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            Topology(2, "cuda", pod_size=2)
        Topology(2, "cuda")
        QuantBags(TABLES, False)
    assert [one.category for one in caught] == [IgnoredArgumentWarning]


def test_the_page_has_what_warns_and_what_is_refused() -> None:
    page = (TESTS.parent / "docs/explanation/coming-from-torchrec.md").read_text()
    rows = []
    for row in IGNORED:
        if row.happens == "nothing":
            continue
        names = "all fields" if row.parameters == ("*",) else ", ".join(f"`{name}`" for name in row.parameters)
        rows.append(f"| {', '.join(f'`{of}`' for of in row.of)} | {names} | {row.happens} | {row.why} |")
    (start,) = (at for at, line in enumerate(page.splitlines()) if line == "| of | argument | given | since |")
    table = itertools.takewhile(lambda line: line.startswith("|"), page.splitlines()[start + 2 :])
    assert list(table) == rows
