"""The settings of a fused kernel: TorchRec's ``fused_params`` dictionary as a checked, frozen dataclass."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from recinfer.distributed.types import BoundsCheckMode, CacheAlgorithm
from recinfer.distributed.types.enums import OptimType
from recinfer.errors import ConfigError
from recinfer.ignored import IgnoredArgumentWarning, warn_ignored

if TYPE_CHECKING:
    from recinfer.optim.row_updates import Hyper

__all__ = [
    "FusedSettings",
    "WeightDecayMode",
    "bounds_check_mode",
    "canonical_names",
    "check_packed_params",
    "names_optimizer",
    "output_dtype_of",
]


class WeightDecayMode(Enum):
    """How ``weight_decay`` acts (FBGEMM's values)."""

    NONE = 0  # only formulas with an own weight decay apply it, so not SGD and the Adagrads
    L2 = 1  # SGD and the Adagrads add weight_decay * w to the gradient
    DECOUPLE = 2  # SGD and the Adagrads shrink w by lr * weight_decay * w, separate from the gradient


# Documented keys that choose how FBGEMM places or caches rows. These keys change no number: the CUDA kernel reads them
# (recinfer.distributed.tables.cuda converts them to FBGEMM's own values), and the CPU kernel ignores them.
_PLACEMENT_KEYS = frozenset(
    {
        "cache_algorithm",
        "cache_load_factor",
        "cache_precision",
        "cache_reserved_memory",
        "cache_sets",
        "enforce_hbm",
        "gather_uvm_cache_stats",
        "multipass_prefetch_config",
        "prefetch_pipeline",
        "record_cache_metrics",
        "stats_reporter_config",
        "use_experimental_tbe",
        "uvm_host_mapped",
        "uvm_non_rowwise_momentum",
    }
)
# Arguments of torch's optimizers that no fused kernel has; accepted only as long as they are off.
_NEUTRAL = frozenset(
    {
        "amsgrad",
        "capturable",
        "dampening",
        "decoupled_weight_decay",
        "differentiable",
        "foreach",
        "fused",
        "initial_accumulator_value",
        "lr_decay",
        "maximize",
        "nesterov",
    }
)
# Names other than OptimType's own: FBGEMM's EmbOptimType, by name and by value.
_OPTIMIZER_NAMES = {
    "EXACT_SGD": OptimType.SGD,
    "EXACT_ADAGRAD": OptimType.ADAGRAD,
    "EXACT_ROWWISE_ADAGRAD": OptimType.ROWWISE_ADAGRAD,
    "EXACT_ROW_WISE_ADAGRAD": OptimType.ROWWISE_ADAGRAD,
    "ROW_WISE_ADAGRAD": OptimType.ROWWISE_ADAGRAD,
    "PARTIAL_ROW_WISE_ADAM": OptimType.PARTIAL_ROWWISE_ADAM,
    "PARTIAL_ROW_WISE_LAMB": OptimType.PARTIAL_ROWWISE_LAMB,
}
_CPU_KERNELS = frozenset({OptimType.SGD, OptimType.ADAGRAD, OptimType.ROWWISE_ADAGRAD})
_NOT_RUN = frozenset({OptimType.SHAMPOO, OptimType.LION})
# Optimizers whose formula has no weight decay of its own, but takes one by a mode.
_DECAY_BY_MODE = frozenset({OptimType.SGD, OptimType.ADAGRAD, OptimType.ROWWISE_ADAGRAD})
# Optimizers whose formula shrinks w by lr * weight_decay * w, as AdamW.
_DECOUPLED = frozenset({OptimType.ADAM, OptimType.PARTIAL_ROWWISE_ADAM})
# Numbers of some optimizers' formulas only.
_WITH_BETAS = frozenset(
    {OptimType.ADAM, OptimType.PARTIAL_ROWWISE_ADAM, OptimType.LAMB, OptimType.PARTIAL_ROWWISE_LAMB}
)
_IN_FORMULAS = {
    "eps": _WITH_BETAS | {OptimType.ADAGRAD, OptimType.ROWWISE_ADAGRAD},
    "beta1": _WITH_BETAS,
    "beta2": _WITH_BETAS,
    "eta": frozenset({OptimType.LARS_SGD}),
}
_DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
_CACHED = {"FP32": torch.float32, "FP16": torch.float16}  # element types of the rows in FBGEMM's cache


@dataclass(frozen=True)
class FusedSettings:
    """Settings of the optimizer in the backward of a lookup, and of the kernel's outputs and caches.

    Attributes:
        optimizer: the update of the touched rows.
        learning_rate, eps, beta1, beta2, weight_decay, weight_decay_mode, momentum, eta: parameters of its formula; see
            :mod:`recinfer.optim.row_updates`. ``momentum`` and ``eta`` are LARS's, the betas Adam's and LAMB's.
        max_norm: rows longer than this are scaled down to it after a row-wise Adagrad step; 0 means never.
        gradient_clipping, max_gradient: clamp every element of the output's gradient to ``±max_gradient``.
        stochastic_rounding: round float16 rows at random where the kernel can (CUDA); to the nearest on CPU.
        bounds_check_mode: treatment of ids outside a table: FATAL is an error; WARNING and IGNORE read and train row 0.
        output_dtype: element type of the looked-up vectors.
        placement: settings of FBGEMM's CUDA caches: ``cache_algorithm`` a CacheAlgorithm, ``cache_precision`` a torch.dtype,
            others as FBGEMM takes them.
    """

    optimizer: OptimType = OptimType.SGD
    learning_rate: float = 0.01
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    weight_decay_mode: WeightDecayMode = WeightDecayMode.NONE
    momentum: float = 0.9
    eta: float = 0.001
    max_norm: float = 0.0
    gradient_clipping: bool = False
    max_gradient: float = 1.0
    stochastic_rounding: bool = True
    bounds_check_mode: BoundsCheckMode = BoundsCheckMode.FATAL
    output_dtype: torch.dtype = torch.float32
    placement: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.optimizer in _NOT_RUN:
            known = ", ".join(t.value for t in OptimType if t not in _NOT_RUN)
            raise ConfigError(f"fused_params: optimizer {self.optimizer.value} has no kernel; expected one of: {known}")
        for name in ("gradient_clipping", "stochastic_rounding"):
            if getattr(self, name) not in (False, True):
                raise ConfigError(f"fused_params: {name}={getattr(self, name)!r}; expected True or False")
        for name in ("learning_rate", "eps", "weight_decay", "max_norm", "max_gradient", "momentum", "eta"):
            if not (_is_number(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"fused_params: {name}={getattr(self, name)!r}; expected a number of at least 0")
        for name in ("beta1", "beta2"):
            if not (_is_number(getattr(self, name)) and 0 <= getattr(self, name) < 1):
                raise ConfigError(f"fused_params: {name}={getattr(self, name)!r}; expected a number in [0, 1)")

    @property
    def has_cpu_kernel(self) -> bool:
        """Whether FBGEMM has a CPU operator for exactly this update; those operators silently ignore weight decay and
        max_norm."""
        decays = self.weight_decay > 0 and self.weight_decay_mode is not WeightDecayMode.NONE
        cuts = self.max_norm > 0 and self.optimizer is OptimType.ROWWISE_ADAGRAD
        return self.optimizer in _CPU_KERNELS and not decays and not cuts

    def hyper(self, learning_rate: float) -> Hyper:
        """The parameters of the formula, with the learning rate of this step."""
        from recinfer.optim.row_updates import Hyper  # late: serving imports this module without optimizers

        return Hyper(
            lr=learning_rate,
            eps=self.eps,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            weight_decay_mode=self.weight_decay_mode.name.lower(),
            momentum=self.momentum,
            eta=self.eta,
            max_norm=self.max_norm,
        )

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None) -> FusedSettings:
        """The settings of a ``fused_params`` dictionary, with FBGEMM's defaults for missing keys.

        Optimizers may be given as this package's :class:`OptimType`, as FBGEMM's ``EmbOptimType`` or as text; element
        types as DataType, torch.dtype or FBGEMM's ``SparseType``; other enumerations as ours, FBGEMM's or text. ``lr`` and ``betas`` are taken for ``learning_rate``
        and ``beta1``, ``beta2``; other arguments of torch's optimizers must be off. A momentum, ``max_norm`` or weight
        decay that the optimizer's formula would ignore is an error; other numbers without an effect cause a warning.

        Raises:
            ConfigError: an unknown key or value; the message names it.
        """
        given = canonical_names(params)
        for key in _NEUTRAL & given.keys():
            if given.pop(key):
                raise ConfigError(f"fused_params: no fused kernel has {key}; leave it out, or use a dense kernel")
        placement = {key: given.pop(key) for key in _PLACEMENT_KEYS & given.keys()}
        placement = {key: value for key, value in placement.items() if value is not None}
        if "cache_algorithm" in placement:
            placement["cache_algorithm"] = _member(CacheAlgorithm, placement["cache_algorithm"])
        if "cache_precision" in placement:
            placement["cache_precision"] = _dtype(placement["cache_precision"], "cache_precision", _CACHED)
        known = {f.name for f in fields(cls)} - {"placement"}
        unknown = sorted(given.keys() - known, key=str)
        if unknown:
            raise ConfigError(
                f"fused_params: unknown keys {unknown}; expected some of {sorted(known | _PLACEMENT_KEYS)}"
            )
        parse = {
            "optimizer": _optimizer,
            "weight_decay_mode": lambda v: _member(WeightDecayMode, v),
            "bounds_check_mode": lambda v: _member(BoundsCheckMode, v),
            "output_dtype": _dtype,
        }
        for key, function in parse.items():
            if key in given:
                given[key] = function(given[key])
        _refuse_ignored(given)
        _warn_unused(given)
        return cls(**given, placement=placement)


def canonical_names(params: Mapping[str, Any] | None) -> dict[str, Any]:
    """``params`` with FBGEMM's names for the arguments of torch's optimizers: ``lr`` and ``betas``."""
    given = dict(params or {})
    if "lr" in given:
        given["learning_rate"] = given.pop("lr")
    if "betas" in given:
        betas = given.pop("betas")
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            raise ConfigError(f"fused_params: betas={betas!r}; expected a pair of numbers")
        given["beta1"], given["beta2"] = betas
    return given


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _refuse_ignored(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for numbers that the optimizer's formula would ignore."""
    optimizer = given.get("optimizer", FusedSettings.optimizer)
    if optimizer is not OptimType.LARS_SGD and given.get("momentum"):
        raise ConfigError(
            f"fused_params: the fused kernel of {optimizer.value} has no momentum; got momentum={given['momentum']}: "
            "leave it out, use LARS_SGD, or a dense kernel"
        )
    if optimizer is not OptimType.ROWWISE_ADAGRAD and given.get("max_norm"):
        raise ConfigError(
            f"fused_params: only ROWWISE_ADAGRAD has max_norm; got max_norm={given['max_norm']} for {optimizer.value}"
        )
    if optimizer in _DECAY_BY_MODE and given.get("weight_decay") and "weight_decay_mode" not in given:
        raise ConfigError(
            f"fused_params: weight_decay={given['weight_decay']} does nothing for {optimizer.value} without a mode; "
            "give weight_decay_mode=L2 (added to the gradient), DECOUPLE (separate from the gradient) or NONE (off)"
        )
    mode = given.get("weight_decay_mode", WeightDecayMode.NONE)
    own = {WeightDecayMode.NONE} | ({WeightDecayMode.DECOUPLE} if optimizer in _DECOUPLED else set())
    if optimizer not in _DECAY_BY_MODE and given.get("weight_decay") and mode not in own:
        raise ConfigError(
            f"fused_params: the fused kernel of {optimizer.value} has its own weight decay and would ignore "
            f"weight_decay_mode={mode.name}; leave the mode out, or use a dense kernel"
        )


def _warn_unused(given: Mapping[str, Any]) -> None:
    """Warn of numbers that have no effect with these settings, unless they are the defaults."""
    optimizer = given.get("optimizer", FusedSettings.optimizer)
    unused = {name: f"the formula of {optimizer.value}" for name, of in _IN_FORMULAS.items() if optimizer not in of}
    if not given.get("gradient_clipping"):
        unused["max_gradient"] = "an update without gradient_clipping=True"
    for name, what in unused.items():
        if name in given and given[name] != getattr(FusedSettings, name):
            message = f"fused_params: {name}={given[name]} has no effect: {what} does not use it"
            warnings.warn(message, IgnoredArgumentWarning, stacklevel=3)


def _text(value: Any) -> str:
    return str(value.name if isinstance(value, Enum) else value).upper()


def _optimizer(value: Any) -> OptimType:
    text = _text(value)
    if text in _OPTIMIZER_NAMES:
        return _OPTIMIZER_NAMES[text]
    if text in OptimType.__members__:
        return OptimType[text]
    raise ConfigError(f"fused_params: optimizer {value!r}; expected one of {sorted(OptimType.__members__)}")


def _member(kind: Any, value: Any) -> Any:
    text = _text(value)
    if text not in kind.__members__:
        raise ConfigError(f"fused_params: {value!r}; expected one of {sorted(kind.__members__)}")
    return kind[text]


def names_optimizer(params: Mapping[str, Any] | None) -> bool:
    """Whether ``fused_params`` name an optimizer, or the learning rate of the default one, SGD."""
    return bool(params) and not {"optimizer", "learning_rate", "lr"}.isdisjoint(params or {})


def bounds_check_mode(params: Mapping[str, Any] | None) -> BoundsCheckMode:
    """The bounds check of ids in a ``fused_params`` dictionary; by default, an id outside its table is an error."""
    given = (params or {}).get("bounds_check_mode")
    mode: BoundsCheckMode = FusedSettings.bounds_check_mode if given is None else _member(BoundsCheckMode, given)
    return mode


def output_dtype_of(params: Mapping[str, Any] | None) -> torch.dtype:
    """The element type of looked-up vectors in a ``fused_params`` dictionary; float32 by default.

    Raises:
        ConfigError: a type that lookups do not support.
    """
    value = (params or {}).get("output_dtype")
    return torch.float32 if value is None else _dtype(value)


def check_packed_params(of: str, params: Mapping[str, Any] | None, dtype: torch.dtype) -> None:
    """Warn of ``fused_params`` other than ``output_dtype``, and raise if that is not the module's ``dtype``.

    Args:
        of: the class whose constructor calls this, a name of :data:`recinfer.ignored.IGNORED`.

    Raises:
        ConfigError: naming both types.
    """
    given = {name: value for name, value in (params or {}).items() if value}
    warn_ignored(of, "fused_params", given.keys() - {"output_dtype"}, stacklevel=4)
    if "output_dtype" in given and output_dtype_of(given) != dtype:
        raise ConfigError(
            f"fused_params: output_dtype {given['output_dtype']}, but the quantized module gives {dtype}; quantize "
            "it with this output_dtype"
        )


def _dtype(value: Any, key: str = "output_dtype", known: Mapping[str, torch.dtype] = _DTYPES) -> torch.dtype:
    if isinstance(value, torch.dtype) and value in known.values():
        return value
    text = _text(value)
    if text not in known:
        raise ConfigError(f"fused_params: {key} {value!r}; expected one of {sorted(known)}")
    return known[text]
