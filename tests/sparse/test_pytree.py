"""Pytrees, torch.fx and torch.compile: the sparse types go through torch's tracing whole."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor, nn
from torch.fx import _pytree as fx_pytree
from torch.utils import _pytree as pytree

from recinfer.errors import InputError
from recinfer.sparse.checks import MissingKeyError
from recinfer.sparse.jagged_tensor import (
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    flatten_kjt_list,
    jt_is_equal,
    kjt_is_equal,
    unflatten_kjt_list,
)


def samples() -> list[KeyedJaggedTensor]:
    fixed = KeyedJaggedTensor(["a", "b"], torch.arange(4), torch.rand(4), lengths=torch.tensor([1, 2, 0, 1]))
    variable = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(6),
        lengths=torch.tensor([1, 2, 0, 2, 1]),
        stride_per_key_per_rank=[[2, 1], [1, 1]],
        inverse_indices=(["b", "a"], torch.tensor([[0, 1, 2, 0], [1, 0, 1, 1]])),
    )
    return [fixed, variable]


def test_flatten_and_unflatten_give_the_same() -> None:
    for kjt in samples():
        leaves, spec = pytree.tree_flatten(kjt)
        back = pytree.tree_unflatten(leaves, spec)
        assert kjt_is_equal(back, kjt)
        if kjt.inverse_indices_or_none() is not None:
            assert back.inverse_indices()[0] == ["b", "a"]
            assert torch.equal(back.inverse_indices()[1], kjt.inverse_indices()[1])
        names = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(kjt)[0]]
        assert names[:3] == ["._values", "._weights", "._lengths"]
    jagged = samples()[0]["a"]
    assert jt_is_equal(pytree.tree_map(lambda t: t, jagged), jagged)
    kt = pytree.tree_map_only(Tensor, lambda t: t * 2, KeyedTensor(["a"], [3], torch.ones(2, 3)))
    assert kt["a"].sum() == 12


def test_spec_serialises() -> None:
    for kjt in samples():
        spec = pytree.tree_flatten(kjt)[1]
        again = pytree.treespec_loads(pytree.treespec_dumps(spec))
        assert kjt_is_equal(pytree.tree_unflatten(pytree.tree_flatten(kjt)[0], again), kjt)


def test_lists_flatten_together() -> None:
    kjts = samples()
    values, contexts = flatten_kjt_list(kjts)
    assert len(values) == 12
    back = unflatten_kjt_list(values, contexts)
    assert all(kjt_is_equal(a, b) for a, b in zip(back, kjts, strict=True))


class Builds(nn.Module):
    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        kjt = KeyedJaggedTensor(["a", "b"], values, lengths=lengths)
        return kjt["b"].values() * 2


def test_fx_records_construction() -> None:
    graph = torch.fx.symbolic_trace(Builds())
    values, lengths = torch.arange(4), torch.tensor([1, 1, 2, 0])
    assert any(node.target is KeyedJaggedTensor for node in graph.graph.nodes)
    assert torch.equal(graph(values, lengths), Builds()(values, lengths))


class Takes(nn.Module):
    def forward(self, kjt: KeyedJaggedTensor, jagged: JaggedTensor) -> Tensor:
        return kjt.values().sum() + jagged.values().sum() + kjt.lengths().sum()


def test_export_takes_them_as_inputs() -> None:
    kjt = samples()[0]
    program = torch.export.export(Takes(), (kjt, kjt["b"]), strict=False)
    assert program.module()(kjt, kjt["b"]) == Takes()(kjt, kjt["b"])


def reordered(kjt: KeyedJaggedTensor, order: list[int]) -> KeyedJaggedTensor:
    """The same ids under the keys in another order, lengths and offsets where ``kjt`` has them, inverse indices too."""
    other = kjt.permute(order)
    inverse = kjt.inverse_indices_or_none()
    variable = kjt.variable_stride_per_key()
    return KeyedJaggedTensor(
        other.keys(),
        other.values(),
        other.weights_or_none(),
        lengths=other.lengths() if kjt.lengths_or_none() is not None else None,
        offsets=other.offsets() if kjt.offsets_or_none() is not None else None,
        stride_per_key_per_rank=other.stride_per_key_per_rank() if variable else None,
        inverse_indices=None if inverse is None else (inverse[0][::-1], inverse[1].flip(0)),
    )


def test_a_spec_takes_jagged_keys_in_another_order() -> None:
    with_offsets = KeyedJaggedTensor(["a", "b"], torch.arange(4), offsets=torch.tensor([0, 1, 3, 3, 4]))
    for kjt in [*samples(), with_offsets]:
        spec = pytree.tree_flatten(kjt)[1]
        given = reordered(kjt, [1, 0])
        leaves = fx_pytree.tree_flatten_spec(given, spec)
        for leaf, same in zip(leaves, pytree.tree_flatten(kjt)[0], strict=True):
            assert (leaf is None) == (same is None) and (leaf is None or torch.equal(leaf, same))
        again = pytree.treespec_loads(pytree.treespec_dumps(spec))
        assert kjt_is_equal(pytree.tree_unflatten(fx_pytree.tree_flatten_spec(given, again), again), kjt)
    extra = KeyedJaggedTensor(["z", "b", "a"], torch.arange(3), lengths=torch.ones(3, dtype=torch.int64))
    spec = pytree.tree_flatten(with_offsets)[1]
    assert fx_pytree.tree_flatten_spec(extra, spec)[0].tolist() == [2, 1]
    with pytest.raises(MissingKeyError, match=r"keys \['b'\] are missing.*has \['a', 'b'\], got \['a'\]"):
        fx_pytree.tree_flatten_spec(with_offsets.permute([0]), spec)
    with pytest.raises(InputError, match="occurs twice"):
        fx_pytree.tree_flatten_spec(with_offsets.permute([1, 0, 1]), spec)


def test_a_spec_takes_a_keyed_tensor_in_another_order() -> None:
    kt = KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1.0, 2.0, 2.0]]))
    spec = pytree.tree_flatten(kt)[1]
    for given in (KeyedTensor(["b", "a"], [2, 1], torch.tensor([[2.0, 2.0, 1.0]])), kt):
        (values,) = fx_pytree.tree_flatten_spec(given, spec)
        assert torch.equal(values, kt.values())
    with pytest.raises(InputError, match=r"keys \['a', 'b'\] have lengths \[2, 1\]"):
        fx_pytree.tree_flatten_spec(KeyedTensor(["b", "a"], [1, 2], torch.ones(1, 3)), spec)
    with pytest.raises(MissingKeyError, match=r"keys \['b'\] are missing"):
        fx_pytree.tree_flatten_spec(KeyedTensor(["a"], [1], torch.ones(1, 1)), spec)


class Pools(nn.Module):
    """A KeyedTensor of ``keys`` in their order, as an EmbeddingBagCollection gives it."""

    def __init__(self, keys: list[str]) -> None:
        super().__init__()
        self.order = keys

    def forward(self, dense: Tensor) -> KeyedTensor:
        parts = {"a": dense * 2, "b": dense + 7}
        return KeyedTensor.from_tensor_list(self.order, [parts[key] for key in self.order])


class Over(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pools = Pools(["a", "b"])

    def forward(self, dense: Tensor) -> Tensor:
        pooled = self.pools(dense)
        return pooled["a"] - 10 * pooled["b"]


def test_a_swapped_submodule_may_give_its_keys_in_another_order() -> None:
    dense = torch.rand(3, 2)
    program = torch.export.export(Over(), (dense,), strict=False, preserve_module_call_signature=("pools",))
    module = torch.export.unflatten(program)
    expected = Over()(dense)
    assert torch.equal(module(dense), expected)
    module.pools = Pools(["b", "a"])
    assert torch.equal(module(dense), expected)


def test_an_exported_program_refuses_other_orders_at_its_edge() -> None:
    """torch compares the whole input with the example's before it flattens, and names both orders of keys."""
    kt = KeyedTensor(["a", "b"], [1, 2], torch.rand(2, 3))
    program = torch.export.export(Reads(), (kt,), strict=False)
    saved = io.BytesIO()
    torch.export.save(program, saved)
    saved.seek(0)
    for ready in (program, torch.export.load(saved)):
        assert torch.equal(ready.module()(kt), Reads()(kt))
        with pytest.raises(ValueError, match=r"(?s)\['a', 'b'\].*\['b', 'a'\]"):
            ready.module()(KeyedTensor(["b", "a"], [2, 1], torch.rand(2, 3)))


class Reads(nn.Module):
    def forward(self, kt: KeyedTensor) -> Tensor:
        return kt["a"] * 2 + kt["b"].sum(1, keepdim=True)
