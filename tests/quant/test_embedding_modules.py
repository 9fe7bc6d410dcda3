"""Quantized collections against the plain-torch reference and the float modules."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch.ao import quantization
from torch.utils._python_dispatch import TorchDispatchMode

from recinfer.errors import ConfigError, InputError
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingCollection as FloatEmbeddingCollection
from recinfer.quant import buffers
from recinfer.quant.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.quant.reference import reference_lookup
from recinfer.quant.rows import PACKED_TYPES, unpack_rows
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.quant.cases import MIXED, bag_configs, float_bags, quantized_sequences, random_features

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
ODD = [("a", 40, 7, ["f0"]), ("b", 1, 1, ["f1"]), ("c", 300, 33, ["f2", "f3"]), ("d", 77, 64, ["f4"])]


def expected_bags(module: EmbeddingBagCollection, features: KeyedJaggedTensor) -> torch.Tensor:
    columns = []
    for config in module.embedding_bag_configs():
        for name in config.feature_names:
            jagged = features[name]
            columns.append(
                reference_lookup(
                    module.packed_table(config.name),
                    config.embedding_dim,
                    config.data_type,
                    jagged.values(),
                    jagged.offsets(),
                    config.pooling,
                    jagged.weights_or_none() if module.is_weighted() else None,
                )
            )
    return torch.cat(columns, dim=1)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", [[SUM] * 4, [MEAN] * 4, [SUM, MEAN, MEAN, SUM]], ids=["sum", "mean", "mixed"])
@pytest.mark.parametrize("types", [*[[t] for t in PACKED_TYPES], MIXED], ids=str)
def test_pooled_equals_the_reference(types: object, pooling: list[PoolingType], weighted: bool) -> None:
    per_table = types if isinstance(types, dict) else dict.fromkeys("abcd", types[0])  # type: ignore[index]
    for shapes in (None, ODD):
        source = float_bags(pooling, weighted, shapes) if shapes else float_bags(pooling, weighted)
        module = EmbeddingBagCollection.from_float(source, per_table=per_table)
        for batch in (1, 3, 64):
            features = random_features(module.embedding_bag_configs(), batch, weighted=weighted)
            out = module(features)
            assert out.keys() == ["f0", "f1", "f2", "f3", "f4"]
            assert out.length_per_key() == [
                c.embedding_dim for c in module.embedding_bag_configs() for _ in c.feature_names
            ]
            torch.testing.assert_close(out.values(), expected_bags(module, features), rtol=1e-5, atol=1e-5)


def test_mixed_pooling_gives_the_bits_of_pure_pooling() -> None:
    mixed = EmbeddingBagCollection.from_float(float_bags([SUM, MEAN, MEAN, SUM]))
    means = EmbeddingBagCollection.from_float(float_bags([MEAN] * 4))
    sums = EmbeddingBagCollection.from_float(float_bags([SUM] * 4))
    features = random_features(bag_configs(), 50)
    out, mean, total = mixed(features), means(features), sums(features)
    for name in ("f0", "f4"):
        assert torch.equal(out[name], total[name])
    for name in ("f1", "f2", "f3"):
        assert torch.equal(out[name], mean[name])


@pytest.mark.parametrize("types", [*[[t] for t in PACKED_TYPES], MIXED], ids=str)
def test_sequences_equal_the_reference(types: object) -> None:
    per_table = types if isinstance(types, dict) else dict.fromkeys("abcd", types[0])  # type: ignore[index]
    for shapes in (None, ODD):
        module = quantized_sequences(per_table, shapes) if shapes else quantized_sequences(per_table)
        features = random_features(module.embedding_configs(), 20)
        out = module(features)
        assert list(out) == ["f0", "f1", "f2", "f3", "f4"]
        for config in module.embedding_configs():
            for name in config.feature_names:
                rows = unpack_rows(module.packed_table(config.name), config.embedding_dim, config.data_type)
                torch.testing.assert_close(out[name].values(), rows[features[name].values()], rtol=1e-6, atol=1e-6)
                assert torch.equal(out[name].lengths(), features[name].lengths())


def test_sequences_from_float() -> None:
    tables = [EmbeddingConfig(num_embeddings=50, embedding_dim=8, name=n, feature_names=["f" + n]) for n in "ab"]
    source = FloatEmbeddingCollection(tables=tables)
    module = EmbeddingCollection.from_float(source, data_type=DataType.FP32)
    features = random_features(tables, 7)
    for name, jagged in source(features).items():
        assert torch.equal(module(features)[name].values(), jagged.values())
    with_ids = EmbeddingCollection.from_float(FloatEmbeddingCollection(tables=tables, need_indices=True))
    assert torch.equal(with_ids(features)["fa"].weights(), features["fa"].values())


def test_fp32_equals_the_float_module() -> None:
    source = float_bags([SUM, MEAN, SUM, MEAN])
    module = EmbeddingBagCollection.from_float(source, data_type=DataType.FP32)
    features = random_features(module.embedding_bag_configs(), 33)
    torch.testing.assert_close(module(features).values(), source(features).values(), rtol=1e-6, atol=1e-6)


def test_any_feature_order_a_superset_and_int32_give_the_same() -> None:
    module = EmbeddingBagCollection.from_float(float_bags())
    features = random_features(module.embedding_bag_configs(), 9)
    want = module(features).values()
    shuffled = features.permute([3, 0, 4, 2, 1])
    assert torch.equal(module(shuffled).values(), want)
    extra = KeyedJaggedTensor.concat(
        [KeyedJaggedTensor(keys=["zz"], values=torch.arange(9), lengths=torch.ones(9, dtype=torch.int64)), shuffled]
    )
    assert torch.equal(module(extra).values(), want)
    assert torch.equal(module(random_features(module.embedding_bag_configs(), 9, dtype=torch.int32)).values(), want)


def test_empty_batch_and_empty_bags() -> None:
    module = EmbeddingBagCollection.from_float(float_bags([SUM, MEAN, SUM, SUM]))
    keys = ["f0", "f1", "f2", "f3", "f4"]
    none = torch.empty(0, dtype=torch.int64)
    assert module(KeyedJaggedTensor(keys=keys, values=none, lengths=none)).values().shape == (0, 8 + 16 + 24 * 2 + 8)
    empty = module(KeyedJaggedTensor(keys=keys, values=none, lengths=torch.zeros(10, dtype=torch.int64)))
    assert empty.values().shape == (2, 80) and not empty.values().any()
    sequences = quantized_sequences(MIXED)
    out = sequences(KeyedJaggedTensor(keys=keys, values=none, lengths=torch.zeros(10, dtype=torch.int64)))
    assert out["f2"].values().shape == (0, 24)


@pytest.mark.parametrize("bad", [-1, -7, 300, 2**40])
def test_out_of_range_ids_are_named(bad: int) -> None:
    module = EmbeddingBagCollection.from_float(float_bags())
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=["f0", "f1", "f2", "f3", "f4"],
        values=torch.tensor([0, 0, 299, bad, 5, 5]),
        lengths=torch.tensor([1, 0, 0, 1, 0, 2, 2, 0, 0, 0]),
    )
    with pytest.raises(InputError, match=rf"'f2', sample 1: id {bad} is out of range; its table has rows 0 to 299"):
        module(features)


def test_missing_feature_and_missing_weights_are_named() -> None:
    module = EmbeddingBagCollection.from_float(float_bags())
    with pytest.raises(InputError, match="features f1, f3 are missing; got f0, f2, f4"):
        module(random_features(module.embedding_bag_configs(), 2).permute([0, 2, 4]))
    weighted = EmbeddingBagCollection.from_float(float_bags(is_weighted=True))
    with pytest.raises(InputError, match="weights are missing"):
        weighted(random_features(weighted.embedding_bag_configs(), 2))


def test_state_dict_round_trip_and_copies() -> None:
    module = EmbeddingBagCollection.from_float(float_bags(), per_table=MIXED)
    features = random_features(module.embedding_bag_configs(), 12)
    want = module(features).values()
    state = module.state_dict()
    assert sorted(state) == [f"embedding_bags.{t}.weight" for t in "abcd"]
    fresh = EmbeddingBagCollection(module.embedding_bag_configs(), False, "cpu")
    assert not fresh(features).values().any()
    fresh.load_state_dict(state)
    assert torch.equal(fresh(features).values(), want)
    for twin in (copy.deepcopy(module), module.copy("cpu")):
        module.packed_table("a").zero_()
        assert torch.equal(twin(features).values(), want)
        module.load_packed("a", twin.packed_table("a"))
    assert torch.equal(torch.nn.Sequential(module).half()(features).values(), want)


def test_meta_needs_no_memory() -> None:
    configs = [EmbeddingBagConfig(num_embeddings=10**9, embedding_dim=128, name="big", feature_names=["f"])]
    configs[0].data_type = DataType.INT8
    module = EmbeddingBagCollection(configs, False, "meta")
    assert module.packed_table("big").shape == (10**9, 132) and module.placed["big"].offset == 0
    out = module(
        KeyedJaggedTensor(
            keys=["f"],
            values=torch.empty(6, dtype=torch.int64, device="meta"),
            lengths=torch.empty(3, dtype=torch.int64, device="meta"),
            stride=3,
        )
    )
    assert out.values().shape == (3, 128)


@pytest.mark.parametrize("weighted", [False, True])
def test_meta_features_in_any_order(weighted: bool) -> None:
    configs = bag_configs([SUM, MEAN, MEAN, SUM])
    module = EmbeddingBagCollection(configs, weighted, "meta")
    features = random_features(configs, 5, weighted=weighted)
    order = [3, 0, 4, 2, 1]
    for given in (features, features.permute(order), KeyedJaggedTensor.concat([features, features.permute(order)])):
        bare = KeyedJaggedTensor(given.keys(), given.values(), given.weights_or_none(), lengths=given.lengths())
        out = module(bare.to(torch.device("meta")))
        assert out.values().is_meta and out.values().shape == (5, 8 + 16 + 24 * 2 + 8)
        assert out.keys() == ["f0", "f1", "f2", "f3", "f4"]


def test_codes_and_scales_as_torchrec_hands_them() -> None:
    source = EmbeddingBagCollection.from_float(float_bags())
    pairs = {t: (source.packed_table(t)[:, 4:], source.packed_table(t)[:, :4]) for t in "abcd"}
    module = EmbeddingBagCollection(source.embedding_bag_configs(), False, table_name_to_quantized_weights=pairs)
    features = random_features(source.embedding_bag_configs(), 5)
    assert torch.equal(module(features).values(), source(features).values())


def test_fbgemm_module_reads_the_same_bytes() -> None:
    module = EmbeddingBagCollection.from_float(float_bags(), per_table=MIXED)
    features = random_features(module.embedding_bag_configs(), 6)
    (tbe,) = module.tbes()
    assert tbe.weights_host.data_ptr() == module.storage.near.data_ptr()
    assert torch.equal(tbe(features.values(), features.offsets()), module(features).values())


def test_bad_configs_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown tables zz"):
        EmbeddingBagCollection.from_float(float_bags(), per_table={"zz": DataType.INT8})
    with pytest.raises(ConfigError, match="different names"):
        EmbeddingBagCollection([*bag_configs(), *bag_configs()], False)
    with pytest.raises(InputError, match=r"expected \(40, 12\)"):
        EmbeddingBagCollection.from_float(float_bags()).load_packed("a", torch.zeros(3, 12, dtype=torch.uint8))
    source = float_bags()
    source.embedding_bags["c"].weight.data[123, 4] = float("inf")
    with pytest.raises(InputError, match="table 'c', row 123, column 4: got inf"):
        EmbeddingBagCollection.from_float(source)


class QuantConfig(NamedTuple):
    """TorchRec's: torch's QConfig with a type for some tables."""

    activation: Any
    weight: Any
    per_table_weight_dtype: dict[str, torch.dtype] | None = None


def observer(dtype: torch.dtype) -> Any:
    return quantization.PlaceholderObserver.with_args(dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_vectors_are_of_the_type_of_the_qconfig(dtype: torch.dtype) -> None:
    tables = [EmbeddingConfig(num_embeddings=50, embedding_dim=8, name=n, feature_names=["f" + n]) for n in "ab"]
    model = torch.nn.ModuleDict(
        {"bags": float_bags([SUM, MEAN, MEAN, SUM], shapes=ODD), "rows": FloatEmbeddingCollection(tables=tables)}
    )
    exact = EmbeddingBagCollection.from_float(model["bags"])
    qconfig = quantization.QConfig(activation=observer(dtype), weight=observer(torch.qint8))
    mapping = {type(model["bags"]): EmbeddingBagCollection, FloatEmbeddingCollection: EmbeddingCollection}
    quantized = quantization.quantize_dynamic(model, dict.fromkeys(mapping, qconfig), mapping=mapping)
    bags, rows = quantized["bags"], quantized["rows"]
    assert isinstance(bags, EmbeddingBagCollection) and isinstance(rows, EmbeddingCollection)
    assert bags.output_dtype() == rows.output_dtype() == dtype
    features = random_features(bags.embedding_bag_configs(), 12)
    out = bags(features).values()
    assert out.dtype == dtype
    step = {torch.float32: 0.0, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(out.float(), exact(features).values(), rtol=step, atol=1e-6)
    assert rows(random_features(tables, 3))["fa"].values().dtype == dtype


def test_a_qconfig_says_the_precision_of_each_table() -> None:
    source = float_bags()
    source.qconfig = QuantConfig(
        observer(torch.float32), observer(torch.qint8), {"b": torch.quint4x2, "other": torch.quint4x2}
    )
    module = EmbeddingBagCollection.from_float(source)
    assert [c.data_type for c in module.embedding_bag_configs()] == [
        DataType.INT8,
        DataType.INT4,
        DataType.INT8,
        DataType.INT8,
    ]
    given = EmbeddingBagCollection.from_float(source, per_table={"a": DataType.FP16}, output_dtype=torch.float16)
    assert [c.data_type for c in given.embedding_bag_configs()][:2] == [DataType.FP16, DataType.INT4]
    assert given.output_dtype() == torch.float16
    assert {c.data_type for c in EmbeddingBagCollection.from_float(source, data_type=DataType.INT2)._configs} == {
        DataType.INT2
    }
    source.qconfig = quantization.default_dynamic_qconfig
    with pytest.raises(ConfigError, match=r"the activation is torch\.quint8; expected one of"):
        EmbeddingBagCollection.from_float(source)


class Copies(TorchDispatchMode):
    """Notes how many bytes each copy writes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default:
            self.sizes.append(args[0].nbytes)
        return function(*args, **(kwargs or {}))


def test_a_copy_to_a_device_goes_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between rows of two widths each takes memory of its size on a GPU, beside the table."""
    monkeypatch.setattr(buffers, "_COPY_BYTES", 1000)
    module = EmbeddingBagCollection.from_float(float_bags(), per_table=MIXED)
    with Copies() as copies:
        other = module.copy("cpu")
    assert copies.sizes and max(copies.sizes) <= 1000
    assert all(
        torch.equal(other.packed_table(c.name), module.packed_table(c.name)) for c in module.embedding_bag_configs()
    )
