"""A mapping of ragged tensors becomes the KeyedJaggedTensor with the same bags."""

from __future__ import annotations

import pytest
import torch

from recinfer.errors import InputError
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from recinfer.sparse.tensor_dict import maybe_td_to_kjt

BAGS = {"a": [[1, 2], []], "b": [[3], [4, 5]]}


def nested(bags: list[list[int]]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(bag, dtype=torch.int64) for bag in bags], layout=torch.jagged)


def bags_of(kjt: KeyedJaggedTensor) -> dict[str, list[list[int]]]:
    return {key: [bag.tolist() for bag in kjt[key].to_dense()] for key in kjt.keys()}  # noqa: SIM118


def test_nested_tensors_and_jagged_tensors_keep_their_bags_and_the_order_asked_for() -> None:
    features = {"a": nested(BAGS["a"]), "b": JaggedTensor(torch.tensor([3, 4, 5]), lengths=torch.tensor([1, 2]))}
    assert bags_of(maybe_td_to_kjt(features)) == BAGS
    swapped = maybe_td_to_kjt(features, ["b", "a"])
    assert list(swapped.keys()) == ["b", "a"] and bags_of(swapped) == {"b": BAGS["b"], "a": BAGS["a"]}
    assert bags_of(maybe_td_to_kjt(features, ["b"])) == {"b": BAGS["b"]}


def test_a_nested_view_with_gaps_between_its_rows() -> None:
    padded = torch.tensor([[1, 2, 0], [0, 0, 0], [7, 8, 9]])
    view = torch.nested.narrow(padded, 1, torch.zeros(3, dtype=torch.int64), torch.tensor([2, 0, 3]), torch.jagged)
    assert view.lengths() is not None
    assert bags_of(maybe_td_to_kjt({"a": view})) == {"a": [[1, 2], [], [7, 8, 9]]}


def test_a_keyed_jagged_tensor_is_given_back_and_anything_else_refused() -> None:
    kjt = KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1]))
    assert maybe_td_to_kjt(kjt) is kjt
    with pytest.raises(InputError, match=r"features \['c'\] are missing; got \['a', 'b'\]"):
        maybe_td_to_kjt({key: nested(bags) for key, bags in BAGS.items()}, ["a", "c"])
    with pytest.raises(InputError, match="'a' is a Tensor that is not ragged"):
        maybe_td_to_kjt({"a": torch.zeros(3)})
    with pytest.raises(InputError, match="features are a list"):
        maybe_td_to_kjt([kjt])  # type: ignore[arg-type]


def test_a_tensordict() -> None:
    tensordict = pytest.importorskip("tensordict", reason="tensordict is not installed")
    features = tensordict.TensorDict({key: nested(bags) for key, bags in BAGS.items()}, batch_size=[2])
    assert bags_of(maybe_td_to_kjt(features)) == BAGS
