"""Every parameter of fused settings and of quantized modules changes the result, warns, or is an error."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from recinfer.distributed.fused_params import FusedSettings
from recinfer.distributed.quant_embedding import QuantEmbeddingCollectionSharder, ShardedQuantEmbeddingCollection
from recinfer.distributed.quant_embeddingbag import (
    QuantEmbeddingBagCollectionSharder,
    ShardedQuantEmbeddingBagCollection,
)
from recinfer.distributed.tables.cpu import TableGroup, TableShape
from recinfer.distributed.types import BoundsCheckMode, ShardingEnv
from recinfer.errors import ConfigError, InputError
from recinfer.ignored import IgnoredArgumentWarning
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recinfer.quant.embedding_modules import EmbeddingBagCollection as QuantBags
from recinfer.quant.embedding_modules import EmbeddingCollection as QuantRows
from tests.distributed.plans import sharding
from tests.distributed.test_every_parameter import features, plain, silent
from tests.planner.test_every_parameter import changes

# --------------------------------------------------------------------------------------- settings of fused kernels

CLIPPED = {"optimizer": "SGD", "gradient_clipping": True}
DECAYED = {"optimizer": "SGD", "weight_decay": 0.5}
SETTINGS: dict[str, tuple[dict[str, Any], Any]] = {  # settings with which the field has an effect, another value of it
    "optimizer": ({}, "ADAGRAD"),
    "learning_rate": ({}, 0.5),
    "eps": ({"optimizer": "ADAGRAD"}, 0.5),
    "beta1": ({"optimizer": "ADAM"}, 0.5),
    "beta2": ({"optimizer": "ADAM", "eps": 0.5}, 0.5),
    "weight_decay": ({"optimizer": "ADAM"}, 0.5),
    "weight_decay_mode": (DECAYED | {"weight_decay_mode": "L2"}, "NONE"),
    "momentum": ({"optimizer": "LARS_SGD"}, 0.5),
    "eta": ({"optimizer": "LARS_SGD"}, 0.5),
    "max_norm": ({"optimizer": "ROWWISE_ADAGRAD"}, 0.01),
    "gradient_clipping": ({"max_gradient": 0.01}, True),
    "max_gradient": (CLIPPED, 0.01),
    "bounds_check_mode": ({}, BoundsCheckMode.WARNING),
    "output_dtype": ({"bounds_check_mode": "WARNING"}, torch.float16),
}
# Rounding of float16 rows and caches: of the CUDA kernels. On CPU rows are rounded to the nearest and there is no cache.
OF_CUDA = {"stochastic_rounding", "placement"}


def after_two_steps(**settings: Any) -> Any:
    """Rows, and a lookup that has an id outside its table."""
    torch.manual_seed(0)
    group = TableGroup([TableShape("t", 12, 8)], PoolingType.SUM, FusedSettings.from_params(settings))
    group.weights.uniform_(0.5, 1.0)
    for step in range(2):
        group.update(torch.tensor([1, 7, 1]), torch.tensor([0, 2, 3]), None, torch.randn(2, 8) + step)
    try:
        looked_up = plain(group(torch.tensor([1, 99]), torch.tensor([0, 1, 2])).detach())
    except InputError:
        looked_up = "refused"
    return plain(group.weights), looked_up


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_fused_settings(name: str) -> None:
    assert {field.name for field in dataclasses.fields(FusedSettings)} == {*SETTINGS, *OF_CUDA}
    base, value = SETTINGS[name]
    assert changes(lambda: after_two_steps(**base), lambda: after_two_steps(**base | {name: value}))


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"optimizer": "SGD", "eps": 0.5}, "the formula of SGD"),
        ({"optimizer": "ROWWISE_ADAGRAD", "beta1": 0.5}, "the formula of ROWWISE_ADAGRAD"),
        ({"optimizer": "ADAM", "eta": 0.5}, "the formula of ADAM"),
        ({"optimizer": "SGD", "max_gradient": 0.5}, "an update without gradient_clipping=True"),
    ],
)
def test_settings_that_a_formula_does_not_use_warn(settings: dict[str, Any], what: str) -> None:
    with pytest.warns(IgnoredArgumentWarning, match=f"has no effect: {what} does not use it"):
        FusedSettings.from_params(settings)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"learning_rate": "x"}, "learning_rate='x'; expected a number"),
        ({"optimizer": "ADAM", "eps": None}, "eps=None; expected a number"),
        ({"optimizer": "ADAM", "beta1": "x"}, "beta1='x'; expected a number in"),
        ({"optimizer": "ADAM", "betas": 0.9}, "betas=0.9; expected a pair"),
        ({"optimizer": "LARS_SGD", "momentum": [0.9]}, r"momentum=\[0.9\]; expected a number"),
        ({"gradient_clipping": True, "max_gradient": -1}, "max_gradient=-1; expected a number of at least 0"),
        ({"stochastic_rounding": "no"}, "stochastic_rounding='no'; expected True or False"),
        ({None: 1, "foo": 2}, r"unknown keys \[None, 'foo'\]"),
    ],
)
def test_a_value_of_another_type_is_named(settings: dict[Any, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        FusedSettings.from_params(settings)


# --------------------------------------------------------------------------------------- quantized modules

PACKED_BAGS = [EmbeddingBagConfig(12, 8, "t", data_type=DataType.INT8, feature_names=["f"])]
# Codes, and the two bytes each of scale and bias, of other rows.
CODES = {"t": (torch.ones(12, 8, dtype=torch.uint8), torch.full((12, 4), 60, dtype=torch.uint8))}
PACKED_ROWS = [EmbeddingConfig(12, 8, "t", data_type=DataType.INT8, feature_names=["f"])]


def quantized(kind: Any, **given: Any) -> Any:
    """A quantized module; its packed rows and what it gives."""
    tables = PACKED_BAGS if kind is QuantBags else PACKED_ROWS
    base = {"tables": tables, "is_weighted": False} if kind is QuantBags else {"tables": tables}
    return kind(**(base | given))


def looked_up(module: Any) -> Any:
    if module.state_dict() and any(each.is_meta for each in module.state_dict().values()):
        return "meta"
    weighted = getattr(module, "is_weighted", bool)()
    out = module(features(weighted))
    if isinstance(out, dict):
        out = [(each.values(), each.weights_or_none()) for each in out.values()]
    else:
        out = out.keys(), out.values()
    return plain([out, {name: each.shape for name, each in module.state_dict().items()}])


@pytest.mark.parametrize("kind", [QuantBags, QuantRows])
def test_quantized_modules(kind: Any) -> None:
    half = [
        dataclasses.replace(table, data_type=DataType.FP16)
        for table in (PACKED_BAGS if kind is QuantBags else PACKED_ROWS)
    ]
    given = {
        "tables": half,
        "device": torch.device("meta"),
        "output_dtype": torch.float16,
        "table_name_to_quantized_weights": CODES,
        "register_tbes": True,
        "quant_state_dict_split_scale_bias": True,
        "row_alignment": 16,
        "cache_features_order": True,
        **({"is_weighted": True} if kind is QuantBags else {"need_indices": True}),
    }
    filled = {"table_name_to_quantized_weights": CODES}  # rows other than zeros, so that weights of ids count
    weighted = given.pop("is_weighted", None)
    quiet = silent(
        kind, lambda **more: looked_up(quantized(kind, **more)), {"is_weighted": False} | given if weighted else given
    )
    if weighted:
        quiet.remove(f"{kind.__name__}: is_weighted")
        assert looked_up(quantized(kind, **filled, is_weighted=True)) != looked_up(quantized(kind, **filled))
    assert quiet == [f"{kind.__name__}: cache_features_order"]  # recinfer/ignored.py lists it


@pytest.mark.parametrize(
    ("kind", "made", "sharder"),
    [
        (QuantBags, ShardedQuantEmbeddingBagCollection, QuantEmbeddingBagCollectionSharder),
        (QuantRows, ShardedQuantEmbeddingCollection, QuantEmbeddingCollectionSharder),
    ],
)
def test_sharded_quantized_modules(kind: Any, made: Any, sharder: Any) -> None:
    plan = {"t": sharding(PACKED_BAGS[0], "row_wise", [0, 1])}

    def build(**given: Any) -> Any:
        base = {
            "module": quantized(kind),
            "table_name_to_parameter_sharding": plan,
            "env": ShardingEnv.from_local(2, 0),
        }
        module = made(**(base | given))
        return module.fused, str(module._output_device), len(module.shards), looked_up(module)

    given = {
        "module": quantized(kind, table_name_to_quantized_weights=CODES),
        "table_name_to_parameter_sharding": {"t": sharding(PACKED_BAGS[0], "table_wise", [0])},
        "env": ShardingEnv.from_local(1, 0),
        "fused_params": {"register_tbes": True},
        "device": torch.device("meta"),
        "fused": False,
    }
    assert silent(made, build, given) == []

    def offered(**given: Any) -> Any:
        module = quantized(kind)
        one = sharder(**given)
        one.shard(module, plan, ShardingEnv.from_local(2, 0))
        return sorted(one.shardable_parameters(module))

    assert silent(sharder, offered, {"fused_params": {"register_tbes": True}, "shardable_params": ["other"]}) == []
