"""One type describes the position of rows and columns, and one function checks tilings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.sources import nodes_of, tree_of

PACKAGE = Path(__file__).parents[2] / "recinfer"

# Fields by which a class describes a position in a table.
SAYS_WHERE = [
    {"row_start", "row_stop"},
    {"col_start", "col_stop"},
    {"row_start", "rows"},
    {"col_start", "cols"},
    {"offset", "size"},
    {"offsets", "sizes"},
]

RECTANGLES = {
    "layout.rect.Rect",
    "distributed.planner.model.options.Shard",  # TorchRec's documented name; its rect() is what the planner goes on with
}
OTHERS = {
    "layout.rect.Strip",  # columns, and the rectangles that hold their rows
    "serving.shards.rank_modules.Stream",  # the rows of a feature that a rank is asked for
    "checkpoint.dcp.Chunk",  # a box of any tensor in torch's checkpoints, of any number of dimensions
}


def classes() -> Iterator[tuple[str, set[str]]]:
    """Every class with the names of its fields."""
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for node in nodes_of(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                fields = {ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)}
                yield f"{module}.{node.name}", fields


def test_one_class_is_a_rectangle() -> None:
    found = {name for name, fields in classes() if any(says <= fields for says in SAYS_WHERE)}
    assert found == RECTANGLES | OTHERS


def test_no_class_name_could_mean_any_part_of_a_table() -> None:
    found = {name for name, _ in classes() if name.rpartition(".")[2] in ("Block", "Piece", "Rectangle")}
    assert not found
