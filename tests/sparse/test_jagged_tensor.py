"""JaggedTensor: dense rows in and out, padding, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recinfer.errors import InputError
from recinfer.sparse.jagged_tensor import JaggedTensor, jt_is_equal

rows = st.lists(st.lists(st.integers(-9, 9), max_size=4), min_size=1, max_size=5)


def sample(**parts: torch.Tensor) -> JaggedTensor:
    return JaggedTensor(torch.arange(5) + 10, lengths=torch.tensor([2, 0, 3]), **parts)


@settings(max_examples=40, deadline=None)
@given(rows, st.integers(0, 5), st.integers(-3, 3))
def test_padding_against_lists(bags: list[list[int]], width: int, fill: int) -> None:
    dense = [torch.tensor(bag, dtype=torch.int64) for bag in bags]
    jagged = JaggedTensor.from_dense(dense, [d / 2 for d in dense])
    expected = [(bag + [fill] * width)[:width] for bag in bags]
    assert jagged.to_padded_dense(width, fill).tolist() == expected
    longest = max(map(len, bags))
    assert jagged.to_padded_dense().tolist() == [bag + [0] * (longest - len(bag)) for bag in bags]
    weights = jagged.to_padded_dense_weights(width, fill)
    assert weights is not None
    assert weights.tolist() == [([i / 2 for i in bag] + [float(fill)] * width)[:width] for bag in bags]
    assert [row.tolist() for row in jagged.to_dense()] == bags
    padded = jagged.to_padded_dense(longest)
    if longest:
        back = JaggedTensor.from_dense_lengths(padded, jagged.lengths(), padded / 2)
        assert jt_is_equal(back, jagged)


def test_padding_keeps_trailing_dimensions_dtype_and_gradient() -> None:
    values = torch.arange(20.0).view(5, 2, 2).requires_grad_()
    padded = JaggedTensor(values, lengths=torch.tensor([2, 0, 3])).to_padded_dense(2)
    assert padded.shape == (3, 2, 2, 2)
    assert torch.equal(padded[2], values[2:4])
    padded.sum().backward()
    assert values.grad is not None
    assert values.grad[:, 0, 0].tolist() == [1, 1, 1, 1, 0]
    half = JaggedTensor(torch.ones(5, dtype=torch.float16), lengths=torch.tensor([2, 0, 3])).to_padded_dense()
    assert half.dtype == torch.float16


def test_lengths_and_offsets_come_from_each_other() -> None:
    assert sample().lengths_or_none() is not None
    assert sample().offsets_or_none() is None
    assert sample().offsets().tolist() == [0, 2, 2, 5]
    by_offsets = JaggedTensor(torch.arange(5), offsets=torch.tensor([0, 2, 2, 5]))
    assert by_offsets.lengths_or_none() is None
    assert by_offsets.lengths().tolist() == [2, 0, 3]


def test_prints_as_torchrec_does() -> None:
    assert str(sample()) == "JaggedTensor({\n    [[10, 11], [], [12, 13, 14]]\n})\n"
    assert str(sample(weights=torch.zeros(5))) == (
        'JaggedTensor({\n    "values": [[10, 11], [], [12, 13, 14]],\n'
        '    "weights": [[0.0, 0.0], [], [0.0, 0.0, 0.0]]\n})\n'
    )
    assert repr(sample()) == "JaggedTensor(values=torch.int64[5] on cpu, lengths=torch.int64[3] on cpu)"


def test_empty_moves_and_copies() -> None:
    empty = JaggedTensor.empty(is_weighted=True, values_dtype=torch.int32)
    assert (empty.to_dense(), empty.values().dtype, empty.offsets().tolist()) == ([], torch.int32, [0])
    assert empty.to_padded_dense(2).shape == (0, 2)
    like = JaggedTensor.empty_like(sample(weights=torch.ones(5)), torch.device("meta"))
    assert (like.values().is_meta, like.lengths().dtype) == (True, torch.int64)
    assert sample().to(torch.device("meta")).device().type == "meta"
    assert sample(weights=torch.ones(5)).size_in_bytes() == 5 * 8 + 5 * 4 + 3 * 8
    target, source = sample(weights=torch.zeros(5)), sample(weights=torch.ones(5))
    assert target.copy_(source) is target
    assert target.weights().tolist() == [1.0] * 5


def test_equality() -> None:
    assert jt_is_equal(sample(), sample())
    assert not jt_is_equal(sample(), sample(weights=torch.ones(5)))
    assert not jt_is_equal(sample(), JaggedTensor(torch.arange(5) + 10, lengths=torch.tensor([2, 3])))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: JaggedTensor(torch.arange(5), lengths=torch.tensor([9])), "sum to 9 but there are 5 values"),
        (lambda: JaggedTensor(torch.arange(5)), "neither lengths nor offsets"),
        (lambda: JaggedTensor(torch.tensor(5), lengths=torch.tensor([1])), "got a scalar"),
        (lambda: sample(weights=torch.ones(4)), r"got \(4,\) weights for 5 values"),
        (lambda: sample().weights(), "has no weights"),
        (lambda: JaggedTensor.from_dense([]), "got no rows"),
        (lambda: JaggedTensor.from_dense([torch.ones(2)], [torch.ones(1)]), "row 0 has 2 values and 1 weights"),
        (lambda: JaggedTensor.from_dense([torch.ones(2)], [torch.ones(2), torch.ones(1)]), "1 rows of values and 2"),
        (
            lambda: JaggedTensor.from_dense_lengths(torch.ones(2, 3), torch.tensor([1, 4])),
            "sum to 5 but there are 4 values",
        ),
        (lambda: JaggedTensor.from_dense_lengths(torch.ones(2, 3), torch.tensor([1])), r"\(2, 3\) and 1 lengths"),
        (
            lambda: sample().copy_(JaggedTensor.empty_like(sample())),
            r"values has shape \(5,\) here, \(0,\) in the source",
        ),
    ],
)
def test_refuses(build, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build()
