"""KeyedTensor: slices by key, regrouping, and torch.export of what a dense model does with it."""

from __future__ import annotations

import io
import random

import pytest
import torch
from torch import Tensor, nn

from recinfer.errors import InputError
from recinfer.sparse.jagged_tensor import KeyedTensor, permute_multi_embedding


def sample() -> KeyedTensor:
    return KeyedTensor(["a", "b", "c"], [1, 2, 3], torch.arange(12.0).view(2, 6))


def test_keys_are_views_of_the_values() -> None:
    kt = sample()
    assert kt["b"].tolist() == [[1.0, 2.0], [7.0, 8.0]]
    assert {k: v.shape[1] for k, v in kt.to_dict().items()} == {"a": 1, "b": 2, "c": 3}
    assert (kt.offset_per_key(), kt.length_per_key(), kt.key_dim()) == ([0, 1, 3, 6], [1, 2, 3], 1)
    kt["c"].zero_()
    assert kt.values()[:, 3:].abs().sum() == 0
    assert kt.size_in_bytes() == 48


def test_from_tensor_list_along_either_dimension() -> None:
    one, two = torch.rand(2, 3), torch.rand(2, 1)
    kt = KeyedTensor.from_tensor_list(["x", "y"], [one, two])
    assert torch.equal(kt["y"], two)
    rows = KeyedTensor.from_tensor_list(["x", "y"], [one, one + 1], key_dim=0, cat_dim=0)
    assert torch.equal(rows["y"], one + 1)


def test_regroup_against_concatenation_by_key() -> None:
    rng = random.Random(0)
    for _ in range(20):
        kts, blocks = [], {}
        for n in range(rng.randint(1, 3)):
            keys = [f"k{n}{i}" for i in range(rng.randint(1, 4))]
            widths = [rng.randint(1, 4) for _ in keys]
            kts.append(KeyedTensor(keys, widths, torch.rand(3, sum(widths))))
            blocks |= {key: kts[-1][key] for key in keys}
        groups = [rng.choices(list(blocks), k=rng.randint(1, 5)) for _ in range(3)]
        expected = [torch.cat([blocks[key] for key in group], dim=1) for group in groups]
        for got in (KeyedTensor.regroup(kts, groups), permute_multi_embedding(kts, groups)):
            assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
        named = KeyedTensor.regroup_as_dict(kts, groups, ["x", "y", "z"])
        assert list(named) == ["x", "y", "z"]
        assert torch.equal(named["z"], expected[2])


def test_regroup_passes_gradients_and_takes_the_last_of_equal_keys() -> None:
    values = torch.rand(2, 6, requires_grad=True)
    kt = KeyedTensor(["a", "b", "c"], [1, 2, 3], values)
    KeyedTensor.regroup([kt], [["c", "a"], ["a"]])[0].sum().backward()
    assert values.grad is not None
    assert values.grad[0].tolist() == [1, 0, 0, 1, 1, 1]
    other = KeyedTensor(["a"], [2], torch.full((2, 2), 9.0))
    assert KeyedTensor.regroup([sample(), other], [["a"]])[0].tolist() == [[9.0, 9.0]] * 2
    assert KeyedTensor.regroup([sample()], [[]])[0].shape == (2, 0)


def test_prints_as_torchrec_does() -> None:
    assert str(sample()).splitlines()[:3] == [
        "KeyedTensor({",
        '    "a": [[0.0], [6.0]],',
        '    "b": [[1.0, 2.0], [7.0, 8.0]],',
    ]
    assert "torch.float32[2, 6] on meta" in str(sample().to(torch.device("meta")))
    assert str(KeyedTensor([], [], torch.empty(2, 0))) == "KeyedTensor()\n"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: KeyedTensor(["a"], [7], torch.rand(2, 6)), "sum to 7 but values have 6 entries"),
        (lambda: KeyedTensor(["a", "b"], [6], torch.rand(2, 6)), "2 keys and 1 lengths"),
        (lambda: KeyedTensor(["a"], [6], torch.rand(6)), "key_dim 1"),
        (lambda: KeyedTensor.from_tensor_list([], []), "0 keys and 0 tensors"),
        (lambda: KeyedTensor.regroup([], []), "no keyed tensors"),
        (lambda: KeyedTensor.regroup_as_dict([sample()], [["a"]], []), "1 groups and 0 keys"),
    ],
)
def test_refuses(build, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build()


def test_unknown_keys_are_key_errors() -> None:
    with pytest.raises(KeyError, match="no key 'z'"):
        sample()["z"]
    with pytest.raises(KeyError, match="no key 'z'"):
        KeyedTensor.regroup([sample()], [["z"]])


class Dense(nn.Module):
    """What dense parts do with pooled embeddings."""

    def forward(self, dense: Tensor, values: Tensor, more: Tensor) -> tuple[Tensor, Tensor, KeyedTensor]:
        kt = KeyedTensor(["a", "b", "c"], [1, 2, 3], values)
        other = KeyedTensor.from_tensor_list(["d", "e"], [more, dense])
        first, second = KeyedTensor.regroup([kt, other], [["a", "d"], ["c", "b", "e"]])
        named = KeyedTensor.regroup_as_dict([other], [["e"]], ["x"])
        return first + named["x"][:, :1] + kt["c"][:, :1], second * kt.to_dict()["a"], kt


def test_export_follows_it_for_every_batch_size() -> None:
    batch = torch.export.Dim("batch", min=1, max=4096)
    args = (torch.rand(4, 3), torch.rand(4, 6), torch.rand(4, 2))
    program = torch.export.export(Dense(), args, dynamic_shapes=({0: batch},) * 3, strict=False)
    stream = io.BytesIO()
    torch.export.save(program, stream)
    stream.seek(0)
    again = torch.export.load(stream).module()
    for size in (1, 4, 9):
        args = (torch.rand(size, 3), torch.rand(size, 6), torch.rand(size, 2))
        first, second, kt = again(*args)
        expected = Dense()(*args)
        assert torch.equal(first, expected[0])
        assert torch.equal(second, expected[1])
        assert torch.equal(kt["b"], expected[2]["b"])
