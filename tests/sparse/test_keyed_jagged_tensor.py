"""KeyedJaggedTensor against Python lists: every rearrangement, fixed and variable batch."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recinfer.errors import InputError, NotFoundError
from recinfer.sparse.jagged_tensor import (
    ComputeJTDictToKJT,
    ComputeKJTToJTDict,
    JaggedTensor,
    KeyedJaggedTensor,
    jt_is_equal,
    kjt_is_equal,
)
from tests.sparse.naive import NaiveFeatures, features

quick = settings(max_examples=40, deadline=None)


def sample(weighted: bool = False) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["a", "b", "c"],
        torch.arange(8) + 10,
        torch.arange(8) / 2 if weighted else None,
        lengths=torch.tensor([2, 0, 1, 1, 1, 3]),
    )


@quick
@given(features(), st.booleans(), st.sampled_from([torch.int32, torch.int64]))
def test_parts_are_those_it_was_built_from(naive: NaiveFeatures, offsets: bool, dtype: torch.dtype) -> None:
    kjt = naive.build(offsets=offsets, dtype=dtype)
    naive.check(kjt)
    assert kjt.lengths().dtype == kjt.offsets().dtype == dtype
    naive.check(kjt.unsync().sync())


@quick
@given(features(), st.data())
def test_permute_takes_keys_in_any_order_and_twice(naive: NaiveFeatures, data: st.DataObject) -> None:
    order = data.draw(st.lists(st.integers(0, len(naive.bags) - 1), max_size=6))
    kjt = naive.build()
    naive.pick(order).check(kjt.permute(order))
    naive.pick(order).check(kjt.permute(order, torch.tensor(order, dtype=torch.int32)))


@quick
@given(features(), st.data())
def test_split_cuts_and_concat_joins(naive: NaiveFeatures, data: st.DataObject) -> None:
    count = len(naive.bags)
    first = data.draw(st.integers(0, count))
    parts = naive.build().split([first, count - first])
    naive.pick(list(range(first))).check(parts[0])
    naive.pick(list(range(first, count))).check(parts[1])
    joined = KeyedJaggedTensor.concat(parts)
    assert kjt_is_equal(joined, naive.build())
    assert joined.stride() == naive.build().stride()


@quick
@given(features())
def test_dict_round_trip(naive: NaiveFeatures) -> None:
    kjt = naive.build()
    back = KeyedJaggedTensor.from_jt_dict(kjt.to_dict())
    assert back.keys() == kjt.keys()
    assert torch.equal(back.values(), kjt.values())
    assert torch.equal(back.lengths(), kjt.lengths())
    assert back.stride_per_key() == kjt.stride_per_key()
    assert ComputeJTDictToKJT()(ComputeKJTToJTDict()(kjt)).keys() == kjt.keys()


def test_views_share_memory_and_permute_copies() -> None:
    kjt = sample(weighted=True)
    kjt["b"].values()[0] = 77
    kjt.split([1, 2])[1].weights()[1] = 88.0
    assert kjt.values()[2] == 77
    assert kjt.weights()[3] == 88.0
    kjt.permute([1, 0, 2]).values()[0] = -1
    assert kjt.values()[2] == 77


def test_prints_as_torchrec_does() -> None:
    assert str(sample()) == (
        'KeyedJaggedTensor({\n    "a": [[10, 11], []],\n    "b": [[12], [13]],\n    "c": [[14], [15, 16, 17]]\n})\n'
    )
    weighted = str(sample(weighted=True).split([1, 2])[0])
    assert weighted == (
        'KeyedJaggedTensor({\n    "a": {\n        "values": [[10, 11], []],\n'
        '        "weights": [[0.0, 0.5], []]\n    }\n})\n'
    )
    assert str(KeyedJaggedTensor.empty()) == "KeyedJaggedTensor()\n"
    assert repr(sample()) == (
        "KeyedJaggedTensor(keys=['a', 'b', 'c'], values=torch.int64[8] on cpu, lengths=torch.int64[6] on cpu)"
    )


def test_meta_has_shapes_only() -> None:
    meta = sample().to(torch.device("meta"))
    assert meta.device().type == "meta"
    assert meta.stride() == 2
    assert "torch.int64[8] on meta" in str(meta)
    built = KeyedJaggedTensor(["a"], torch.empty(3, device="meta"), lengths=torch.empty(2, device="meta"))
    assert built.stride() == 2
    # Lengths are unknown on meta: as in TorchRec, each key gets equally many values, and the first one the rest.
    assert sample().to(torch.device("meta")).length_per_key() == [4, 2, 2]


def test_to_changes_only_the_weights_dtype() -> None:
    moved = sample(weighted=True).to(torch.device("cpu"), dtype=torch.float64)
    assert moved.weights().dtype == torch.float64
    assert moved.values().dtype == torch.int64


def test_empty_and_empty_like() -> None:
    empty = KeyedJaggedTensor.empty(True, torch.device("cpu"), torch.int32, torch.float64, torch.int64)
    assert (empty.keys(), empty.stride(), empty.length_per_key(), empty.to_dict()) == ([], 0, [], {})
    assert [t.dtype for t in (empty.values(), empty.weights(), empty.lengths())] == [
        torch.int32,
        torch.float64,
        torch.int64,
    ]
    like = KeyedJaggedTensor.empty_like(sample(weighted=True))
    assert (like.keys(), like.stride(), like.weights().numel()) == ([], 2, 0)
    assert KeyedJaggedTensor.concat([like, sample(weighted=True)]).keys() == ["a", "b", "c"]


def variable_batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(6),
        torch.rand(6),
        lengths=torch.tensor([1, 2, 0, 2, 1]),
        stride_per_key_per_rank=[[2, 1], [1, 1]],
        inverse_indices=(["b", "a"], torch.tensor([[0, 1, 1, 0], [1, 0, 2, 1]])),
    )


def test_empty_like_keeps_the_batch_sizes_of_a_variable_batch() -> None:
    kjt = variable_batch()
    like = KeyedJaggedTensor.empty_like(kjt)
    assert (like.keys(), like.values().numel(), like.length_per_key(), like.to_dict()) == ([], 0, [], {})
    assert (like.stride_per_key_per_rank(), like.stride_per_key(), like.stride()) == ([[2, 1], [1, 1]], [3, 2], 4)
    assert like.to(torch.device("cpu")).stride_per_key_per_rank() == [[2, 1], [1, 1]]
    assert [tensor.numel() for tensor in like.dist_tensors()] == [0, 0, 0, 0]
    both = KeyedJaggedTensor.concat([like, kjt])
    assert (both.keys(), both.stride_per_key_per_rank()) == (["a", "b"], [[2, 1], [1, 1]])
    none, everything = kjt.split([0, 2])
    assert (none.keys(), none.stride_per_key_per_rank(), everything) == ([], [], kjt)


def test_empty_like_on_a_device_has_the_sizes_that_copy_fills() -> None:
    for kjt in (sample(weighted=True), variable_batch()):
        on_meta = KeyedJaggedTensor.empty_like(kjt, torch.device("meta"))
        assert on_meta.values().is_meta and on_meta.keys() == kjt.keys()
        assert on_meta.values().shape == kjt.values().shape and on_meta.stride_per_key() == kjt.stride_per_key()
        target = KeyedJaggedTensor.empty_like(kjt, torch.device("cpu"))
        assert target.values().data_ptr() != kjt.values().data_ptr()
        assert kjt_is_equal(target.copy_(kjt), kjt)
        if kjt.inverse_indices_or_none() is not None:
            assert target.inverse_indices()[0] == ["b", "a"]
            assert torch.equal(target.inverse_indices()[1], kjt.inverse_indices()[1])
    jagged = sample(weighted=True)["c"]
    assert jt_is_equal(JaggedTensor.empty_like(jagged, torch.device("cpu")).copy_(jagged), jagged)


def test_sync_keeps_and_unsync_forgets_the_sizes() -> None:
    kjt = sample()
    assert kjt.length_per_key_or_none() is None
    assert kjt.sync() is kjt
    assert (kjt.length_per_key_or_none(), kjt.offset_per_key_or_none()) == ([2, 2, 4], [0, 2, 4, 8])
    assert kjt.unsync().offset_per_key_or_none() is None
    synced = KeyedJaggedTensor.from_lengths_sync(["a"], torch.arange(3), torch.tensor([1, 2]))
    assert synced.length_per_key_or_none() == [3]
    synced = KeyedJaggedTensor.from_offsets_sync(["a", "b"], torch.arange(3), torch.tensor([0, 1, 3]))
    assert synced.length_per_key_or_none() == [1, 2]


def test_copy_clear_and_sizes() -> None:
    kjt, other = sample(weighted=True), sample(weighted=True)
    other.weights().fill_(5)
    assert kjt.copy_(other) is kjt
    assert kjt.weights().tolist() == [5.0] * 8
    assert kjt.size_in_bytes() == 8 * 8 + 8 * 4 + 6 * 8
    kjt.offsets()
    assert kjt.size_in_bytes() == 8 * 8 + 8 * 4 + 6 * 8 + 7 * 8
    with pytest.raises(InputError, match=r"weights are \(8,\) here but None"):
        kjt.copy_(sample())
    assert kjt.clear_storage() == 8 * 8 + 8 * 4 + 6 * 8 + 7 * 8
    assert kjt.values().untyped_storage().size() == 0


def test_inverse_indices_and_variable_stride() -> None:
    inverse = (["a", "b"], torch.tensor([[0, 1, 2, 0], [1, 0, 1, 1]]))
    kjt = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(6),
        lengths=torch.tensor([1, 2, 0, 2, 1]),
        stride_per_key_per_rank=torch.tensor([[3], [2]], dtype=torch.int32),
        inverse_indices=inverse,
    )
    assert (kjt.stride(), kjt.stride_per_key(), kjt.stride_per_key_per_rank()) == (4, [3, 2], [[3], [2]])
    assert kjt.variable_stride_per_key()
    assert kjt.inverse_indices() is inverse
    both = KeyedJaggedTensor.concat([kjt, kjt])
    assert both.inverse_indices()[0] == ["a", "b", "a", "b"]
    assert both.inverse_indices()[1].shape == (4, 4)
    assert kjt.to(torch.device("meta")).inverse_indices()[1].is_meta
    with pytest.raises(InputError, match="no inverse indices"):
        sample().inverse_indices()


def test_unequal_stride_per_key_is_a_variable_batch() -> None:
    kjt = KeyedJaggedTensor(["a", "b"], torch.arange(3), lengths=torch.tensor([1, 1, 1]), stride_per_key=[1, 2])
    assert (kjt.stride_per_key_per_rank(), kjt["b"].values().tolist()) == ([[1], [2]], [1, 2])


def test_lengths_of_two_dimensions_are_flattened() -> None:
    kjt = KeyedJaggedTensor(["a", "b"], torch.arange(3), lengths=torch.tensor([[1, 0], [0, 2]]))
    assert kjt.lengths().tolist() == kjt.flatten_lengths().lengths().tolist() == [1, 0, 0, 2]
    assert kjt["b"].values().tolist() == [1, 2]


def test_what_a_fixed_batch_says_of_ranks_builds_a_fixed_batch() -> None:
    ranks = sample().stride_per_key_per_rank()
    kjt = KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([1, 2]), stride_per_key_per_rank=ranks)
    assert not kjt.variable_stride_per_key()
    assert kjt.stride() == 2


def test_unchecked_parts_are_not_looked_at() -> None:
    kjt = KeyedJaggedTensor.from_parts_unchecked(["a"], torch.arange(3), torch.tensor([1, 2]), stride=2)
    assert kjt["a"].to_dense()[1].tolist() == [1, 2]
    KeyedJaggedTensor.from_parts_unchecked(["a"], torch.arange(3), torch.tensor([9]))  # wrong, and not noticed


def test_copies_and_pickles() -> None:
    kjt = sample(weighted=True).sync()
    assert kjt_is_equal(copy.deepcopy(kjt), kjt)
    assert kjt_is_equal(pickle.loads(pickle.dumps(kjt)), kjt)
    stream = io.BytesIO()
    torch.save(kjt, stream)
    stream.seek(0)
    assert kjt_is_equal(torch.load(stream, weights_only=True), kjt)


def test_equality_sees_order_weights_and_batch() -> None:
    assert kjt_is_equal(sample(), sample().sync())
    assert not kjt_is_equal(sample(), sample(weighted=True))
    assert not kjt_is_equal(sample(), sample().permute([1, 0, 2]))
    assert not kjt_is_equal(sample(), sample().to_dict())


BAD_PARTS = [
    (["a"], {"lengths": torch.tensor([1, 1])}, "lengths sum to 2 but there are 3 values"),
    (["a", "b"], {"lengths": torch.tensor([1, 1, 1])}, "got 3 lengths for 2 keys"),
    (["a"], {"lengths": torch.tensor([4, -1])}, r"lengths\[1\] is -1"),
    (["a"], {"lengths": torch.tensor([3.0])}, r"must hold integers, got torch.float32"),
    (["a"], {"lengths": torch.tensor([[1], [2]])}, r"1 dimension, got shape \(2, 1\)"),
    (["a"], {"offsets": torch.tensor([1, 3])}, "offsets start at 1"),
    (["a"], {"offsets": torch.tensor([0, 2])}, "offsets end at 2 but there are 3 values"),
    (["a"], {"offsets": torch.tensor([0, 2, 1, 3])}, "offsets fall from 2 to 1 at position 2"),
    (["a"], {"offsets": torch.tensor([0, 3]), "lengths": torch.tensor([1, 2])}, "got 2 offsets for 2 lengths"),
    (["a"], {"offsets": torch.tensor([0, 1, 3]), "lengths": torch.tensor([2, 1])}, "lengths and offsets disagree"),
    (["a"], {}, "neither lengths nor offsets"),
    (["a"], {"lengths": torch.tensor([3]), "weights": torch.ones(2)}, r"got \(2,\) weights for 3 values"),
    (["a"], {"lengths": torch.tensor([3]), "stride": 2}, "got 1 lengths for 1 keys of batch size 2; expected 2"),
    (["a"], {"lengths": torch.tensor([1, 2]), "stride_per_key_per_rank": [[1], [1]]}, "got 2 strides for 1 keys"),
    (["a", "b"], {"lengths": torch.tensor([1, 2]), "stride_per_key_per_rank": [[1], [2]]}, "strides sum to 3"),
    ([], {"lengths": torch.tensor([3])}, "got 1 lengths for 0 keys"),
    (["a"], {"lengths": torch.tensor([3]), "inverse_indices": (["a"], torch.zeros(2, 3))}, r"shape \(2, 3\)"),
]


@pytest.mark.parametrize(("keys", "parts", "message"), BAD_PARTS, ids=[m for *_, m in BAD_PARTS])
def test_refuses_parts_that_do_not_fit(keys: list[str], parts: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        KeyedJaggedTensor(keys, torch.arange(3), **parts)


def test_refuses_bad_requests() -> None:
    kjt = sample()
    with pytest.raises(KeyError, match="no key 'z'"):
        kjt["z"]
    with pytest.raises(NotFoundError, match=r"it has \['a', 'b', 'c'\]"):
        kjt["z"]
    with pytest.raises(InputError, match="has no weights"):
        kjt.weights()
    with pytest.raises(InputError, match="hold 2 keys; expected 3"):
        kjt.split([1, 1])
    with pytest.raises(InputError, match="index 5 with 3 keys"):
        kjt.permute([5])
    with pytest.raises(InputError, match="weighted and unweighted"):
        KeyedJaggedTensor.concat([kjt, sample(weighted=True)])
    with pytest.raises(InputError, match="empty list"):
        KeyedJaggedTensor.concat([])
    with pytest.raises(InputError, match=r"\[1, 2\]; expected one"):
        KeyedJaggedTensor.concat([kjt, KeyedJaggedTensor(["z"], torch.arange(3), lengths=torch.tensor([3]))])
    with pytest.raises(InputError, match="got no keys"):
        KeyedJaggedTensor.from_jt_dict({})
    with pytest.raises(InputError, match=r"weights for \['b'\] but not for all"):
        one = torch.tensor([1])
        KeyedJaggedTensor.from_jt_dict(
            {"a": JaggedTensor(one, lengths=one), "b": JaggedTensor(one, one.float(), lengths=one)}
        )
