"""Pytrees, torch.fx and torch.compile: the sparse types go through torch's tracing whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

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
