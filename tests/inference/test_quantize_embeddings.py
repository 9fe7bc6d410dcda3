"""quantize_embeddings replaces by class, in place or in a copy, with the precisions asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from recinfer.errors import ConfigError
from recinfer.inference.modules import quantize_embeddings, quantize_inference_model
from recinfer.models.dlrm import DLRM
from recinfer.modules.embedding_configs import (
    DATA_TYPE_NUM_BITS,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    QuantConfig,
)
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.quant import embedding_modules as quant
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

TABLES = [EmbeddingBagConfig(10, 4, "t1", feature_names=["a"]), EmbeddingBagConfig(10, 4, "t2", feature_names=["b"])]
KJT = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([1, 1, 2, 0]))
DENSE = torch.randn(2, 3)


def dlrm() -> DLRM:
    return DLRM(EmbeddingBagCollection(TABLES), 3, [5, 4], [4, 1])


def test_a_copy_is_quantized_as_quantize_inference_model_does_and_shares_nothing() -> None:
    model = dlrm()
    found = quantize_embeddings(model, torch.qint8, inplace=False)
    assert torch.equal(found(DENSE, KJT), quantize_inference_model(model)(DENSE, KJT))
    assert type(model.sparse_arch.embedding_bag_collection) is EmbeddingBagCollection
    assert not hasattr(model.sparse_arch.embedding_bag_collection, "qconfig")
    assert not {p.data_ptr() for p in found.parameters()} & {p.data_ptr() for p in model.parameters()}


def test_in_place_the_model_itself_changes() -> None:
    model = dlrm()
    assert quantize_embeddings(model, torch.quint4x2, inplace=True) is model
    tables = model.sparse_arch.embedding_bag_collection
    assert isinstance(tables, quant.EmbeddingBagCollection)
    assert {c.data_type for c in tables.embedding_bag_configs()} == {DataType.INT4}
    assert model(DENSE, KJT).shape == (2, 1)


def test_a_collection_alone_precision_by_table_and_float16_outputs() -> None:
    found = quantize_embeddings(
        EmbeddingBagCollection(TABLES),
        torch.qint8,
        inplace=False,
        output_dtype=torch.float16,
        per_table_weight_dtype={"t2": torch.float16},
    )
    assert [c.data_type for c in found.embedding_bag_configs()] == [DataType.INT8, DataType.FP16]  # type: ignore[operator]
    assert found(KJT).values().dtype is torch.float16


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pooled = EmbeddingBagCollection(TABLES)
        self.sequences = EmbeddingCollection([EmbeddingConfig(10, 4, "s", feature_names=["a"])])


class Mine(nn.Module):
    """A quantized class of the user's, which reads its module's qconfig."""

    @classmethod
    def from_float(cls, module: Any) -> Mine:
        made = cls()
        made.types = (module.qconfig.weight().dtype, module.qconfig.activation().dtype)
        return made


def test_more_classes_are_replaced_when_the_caller_names_them() -> None:
    plain = quantize_embeddings(Both(), torch.qint8, inplace=False)
    assert type(plain.sequences) is EmbeddingCollection
    ours = quantize_embeddings(
        Both(), torch.qint8, False, [EmbeddingCollection], {EmbeddingCollection: quant.EmbeddingCollection}
    )
    assert type(ours.sequences) is quant.EmbeddingCollection and type(ours.pooled) is quant.EmbeddingBagCollection
    mine = quantize_embeddings(Both(), torch.quint4x2, True, [EmbeddingCollection], {EmbeddingCollection: Mine})
    assert mine.sequences.types == (torch.quint4x2, torch.float32)


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear holds no EmbeddingBagCollection; nothing to quantize"):
        quantize_embeddings(nn.Linear(2, 2), torch.qint8, inplace=True)
    with pytest.raises(ConfigError, match="no quantized class for EmbeddingCollection"):
        quantize_embeddings(Both(), torch.qint8, True, [EmbeddingCollection])
    with pytest.raises(ConfigError, match=r"names t9; the model has: t1, t2"):
        quantize_embeddings(dlrm(), torch.qint8, True, per_table_weight_dtype={"t9": torch.float16})


def test_from_float_reads_the_tables_of_a_quant_config() -> None:
    module: Any = EmbeddingBagCollection(TABLES)
    observer = torch.ao.quantization.PlaceholderObserver.with_args
    module.qconfig = QuantConfig(observer(dtype=torch.float32), observer(dtype=torch.qint8), {"t1": torch.quint4x2})
    found = quant.EmbeddingBagCollection.from_float(module)
    assert [c.data_type for c in found.embedding_bag_configs()] == [DataType.INT4, DataType.INT8]
    told = quant.EmbeddingBagCollection.from_float(module, data_type=DataType.FP16)
    assert {c.data_type for c in told.embedding_bag_configs()} == {DataType.FP16}
    assert DATA_TYPE_NUM_BITS[DataType.INT4] == DataType.INT4.bits == 4
