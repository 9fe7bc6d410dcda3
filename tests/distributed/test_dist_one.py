"""From one device of this process to all and back: what goes where, views on the same device, sums and concatenations."""

from __future__ import annotations

import pytest
import torch

from recinfer.distributed.dist_data import (
    EmbeddingsAllToOne,
    EmbeddingsAllToOneReduce,
    KJTOneToAll,
    SeqEmbeddingsAllToOne,
)
from recinfer.distributed.embedding_types import KJTList
from recinfer.errors import InputError
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

CPU = torch.device("cpu")


def features() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a", "b", "c"], torch.arange(6), lengths=torch.tensor([1, 0, 2, 1, 0, 2]))


def test_every_device_gets_its_keys() -> None:
    kjt = features()
    parts = KJTOneToAll([2, 0, 1], 3, CPU)(kjt)
    assert isinstance(parts, KJTList)
    assert [part.keys() for part in parts] == [["a", "b"], [], ["c"]]
    assert parts[0].values().tolist() == [0, 1, 2, 3] and parts[2].lengths().tolist() == [0, 2]
    assert parts[2].values().untyped_storage().data_ptr() == kjt.values().untyped_storage().data_ptr()  # no copy
    on_meta = KJTOneToAll([1, 2], 2, torch.device("meta"))(kjt)
    assert [part.device().type for part in on_meta] == ["meta", "meta"]


def test_what_goes_to_a_gpu_goes_from_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is played: no CPU machine has one."""
    done: list[object] = []

    def pin(part: KeyedJaggedTensor) -> KeyedJaggedTensor:
        done.append(("pin", part.keys()))
        return part

    def to(part: KeyedJaggedTensor, device: torch.device, non_blocking: bool = False) -> KeyedJaggedTensor:
        done.append((str(device), non_blocking))
        return part

    monkeypatch.setattr(KeyedJaggedTensor, "pin_memory", pin)
    monkeypatch.setattr(KeyedJaggedTensor, "to", to)
    KJTOneToAll([2, 1], 2, torch.device("cuda"))(features())
    assert done == [("pin", ["a", "b"]), ("cuda:0", True), ("pin", ["c"]), ("cuda:1", True)]


def test_splits_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="got 1 splits; expected one for each of 2 devices"):
        KJTOneToAll([3], 2, CPU)
    with pytest.raises(InputError, match="hold 2 keys; expected 3"):
        KJTOneToAll([1, 1], 2, CPU)(features())


def test_all_come_to_one() -> None:
    x, y = torch.ones(2, 2), torch.zeros(2, 3)
    assert EmbeddingsAllToOne(CPU, 2, cat_dim=1)([x, y]).tolist() == [[1, 1, 0, 0, 0]] * 2
    assert EmbeddingsAllToOne(CPU, 2, cat_dim=0)([x, x + 1]).tolist() == [[1, 1], [1, 1], [2, 2], [2, 2]]
    assert [t.shape for t in SeqEmbeddingsAllToOne(CPU, 2)([x, y])] == [(2, 2), (2, 3)]
    for count in (1, 2, 3):
        tensors = [torch.full((2, 2), float(i + 1)) for i in range(count)]
        total = EmbeddingsAllToOneReduce(CPU, count, cat_dim=1)(tensors)
        assert total.tolist() == [[count * (count + 1) / 2] * 2] * 2
        assert tensors[0][0, 0].item() == 1  # inputs are left as they are


def test_the_device_can_be_changed() -> None:
    for module in (EmbeddingsAllToOne(CPU, 1, 1), SeqEmbeddingsAllToOne(CPU, 1)):
        module.set_device("meta")
        out = module([torch.ones(1, 1)])
        assert (out[0] if isinstance(out, list) else out).device.type == "meta"


def test_a_device_that_sends_nothing_is_missed() -> None:
    for module in (EmbeddingsAllToOne(CPU, 2, 1), SeqEmbeddingsAllToOne(CPU, 2), EmbeddingsAllToOneReduce(CPU, 2, 1)):
        with pytest.raises(InputError, match=f"{type(module).__name__}: got 1 tensors; expected one from each of 2"):
            module([torch.ones(1, 1)])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_between_gpus() -> None:
    parts = KJTOneToAll([1, 2], 2)(features())
    assert [part.device() for part in parts] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    sums = EmbeddingsAllToOneReduce(CPU, 2)([part.values().float().sum() for part in parts])
    assert sums.item() == 15
