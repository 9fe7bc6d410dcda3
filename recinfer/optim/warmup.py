"""Learning rate schedules in stages, as a wrapper of a keyed optimizer."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, unique
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from recinfer.errors import CheckpointError, ConfigError
from recinfer.optim.keyed import KeyedOptimizer, OptimizerWrapper

__all__ = ["WarmupOptimizer", "WarmupPolicy", "WarmupStage"]


@unique
class WarmupPolicy(Enum):
    """The schedule of a stage's multiplier."""

    NONE = "none"  # 1
    LINEAR = "linear"  # from value, at step 0, to 1, at max_iters
    CONSTANT = "constant"  # value
    POLY = "poly"  # (1 - step / decay_iters) ^ value
    STEP = "step"  # value ^ (step // decay_iters)
    INVSQRT = "inv_sqrt"  # 1 / sqrt(step)
    COSINE_ANNEALING_WARM_RESTARTS = "cosine_annealing_warm_restarts"  # from 1 to value, each sgdr_period
    INTERPOLATE = "interpolate"  # from value, at start_interpolating_iters, to end_value, at max_iters


@dataclass
class WarmupStage:
    """A stage of a schedule.

    Attributes:
        policy: the formula of the multiplier.
        max_iters: the last step of the stage, counted from the start of training.
        value: parameter of the policy.
        lr_scale: factor of every multiplier of the stage.
        decay_iters: parameter of STEP, where a number below 1 means 1, and of POLY, where it means ``max_iters``.
        sgdr_period: steps of a period of the cosine.
        start_interpolating_iters, end_value: parameters of INTERPOLATE.
    """

    policy: WarmupPolicy = WarmupPolicy.LINEAR
    max_iters: int = 1
    value: float = 1.0
    lr_scale: float = 1.0
    decay_iters: int = -1
    sgdr_period: int = 1
    start_interpolating_iters: int | None = None
    end_value: float | None = None


def _checked(stages: list[WarmupStage]) -> list[WarmupStage]:
    """The stages with their defaults, followed by one without an end."""
    last, checked = 0, []
    for stage in stages:
        if stage.max_iters <= last:
            raise ConfigError(f"warmup: max_iters={stage.max_iters} after {last} in {stage}; expected a later step")
        if stage.sgdr_period < 1:
            raise ConfigError(f"warmup: sgdr_period={stage.sgdr_period} in {stage}; expected at least 1")
        if stage.policy is WarmupPolicy.INTERPOLATE:
            start = stage.start_interpolating_iters
            if start is None or stage.end_value is None or not start < stage.max_iters:
                raise ConfigError(f"warmup: {stage} needs end_value, and start_interpolating_iters below max_iters")
        if stage.decay_iters < 1:
            stage = replace(stage, decay_iters=1 if stage.policy is WarmupPolicy.STEP else stage.max_iters)
        checked.append(stage)
        last = stage.max_iters
    return [*checked, WarmupStage(policy=WarmupPolicy.NONE, max_iters=sys.maxsize)]


def _multiplier(stage: WarmupStage, step: int) -> float:
    match stage.policy:
        case WarmupPolicy.LINEAR:
            factor = stage.value + (1.0 - stage.value) * step / stage.max_iters
        case WarmupPolicy.CONSTANT:
            factor = stage.value
        case WarmupPolicy.POLY:
            factor = max(0.0, 1.0 - step / stage.decay_iters) ** stage.value
        case WarmupPolicy.STEP:
            factor = stage.value ** (step // stage.decay_iters)
        case WarmupPolicy.INVSQRT:
            factor = 1.0 / math.sqrt(max(step, 1))
        case WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS:
            turn = math.cos(math.pi * (step % stage.sgdr_period) / stage.sgdr_period)
            factor = stage.value + (1.0 - stage.value) * 0.5 * (1.0 + turn)
        case WarmupPolicy.INTERPOLATE:
            assert stage.start_interpolating_iters is not None and stage.end_value is not None
            span = stage.max_iters - stage.start_interpolating_iters
            factor = stage.value + (stage.end_value - stage.value) * (step - stage.start_interpolating_iters) / span
        case _:
            factor = 1.0
    return factor * stage.lr_scale


class WarmupOptimizer(OptimizerWrapper):
    """Sets the learning rate of another optimizer, ``lr`` times the stage's multiplier, for each step.

    The rate of step 0 is set at construction. After the last stage the multiplier is 1. The step and stage are saved in
    the state dict under ``param_name``, ``{"warmup": int64 [step, stage]}``, and so are the param_groups.

    Args:
        optimizer: the optimizer whose rate is set.
        stages: the stages, in order of ``max_iters``.
        lr: the rate at multiplier 1.
        lr_param: the key of param_groups that is set.
        param_name: the key of the state.

    Raises:
        ConfigError: stages that overlap or lack what their policy needs.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        stages: list[WarmupStage],
        lr: float = 0.1,
        lr_param: str = "lr",
        param_name: str = "__warmup",
    ) -> None:
        super().__init__(optimizer)
        self._stages = _checked(stages)
        self._lr = lr
        self._lr_param = lr_param
        self._param_name = param_name
        if param_name in optimizer.params:
            raise ConfigError(f"warmup: a parameter has the name {param_name!r} already; give another param_name")
        # A parameter without elements carries the state, so that code that saves params and state includes it.
        self._place: Tensor = torch.zeros(2, dtype=torch.int64)
        self._carrier = nn.Parameter(torch.empty(0))
        self.save_param_groups(True)
        self._set_rate()

    @property
    def params(self) -> Mapping[str, Tensor | ShardedTensor]:  # type: ignore[override]
        """The wrapped optimizer's parameters and the carrier of the schedule's state."""
        return {**self._optimizer.params, self._param_name: self._carrier}

    @params.setter
    def params(self, value: Any) -> None:
        """Not settable: the wrapped optimizer owns it."""

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state and the schedule's."""
        return {**self._optimizer.state, self._carrier: {"warmup": self._place}}

    @state.setter
    def state(self, value: Any) -> None:
        """Not settable: the wrapped optimizer owns it."""

    def own_state_names(self) -> set[str]:
        """The name of the schedule's state, and those of the wrapped optimizer."""
        return {self._param_name} | super().own_state_names()

    def _set_rate(self) -> None:
        step, stage = (int(n) for n in self._place)
        rate = self._lr * _multiplier(self._stages[stage], step)
        for group in self.param_groups:
            group[self._lr_param] = rate  # type: ignore[index]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the wrapped optimizer, then set the learning rate of the next step."""
        super().step(closure)
        step, stage = (int(n) for n in self._place)
        step += 1
        if step > self._stages[stage].max_iters and stage + 1 < len(self._stages):
            stage += 1
        self._place.copy_(torch.tensor([step, stage]))
        self._set_rate()

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's state and the schedule's."""
        result = self._optimizer.state_dict()
        return {**result, "state": {**result["state"], self._param_name: {"warmup": self._place}}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load the state of the wrapped optimizer and of the schedule.

        Raises:
            CheckpointError: as the wrapped optimizer; or the schedule's state is missing or names no stage.
        """
        states = dict(state_dict.get("state", {}))
        place = states.pop(self._param_name, {}).get("warmup")
        if place is None or place.shape != (2,) or not 0 <= int(place[1]) < len(self._stages):
            raise CheckpointError(
                f"warmup state {self._param_name!r}: got {place}; expected [step, stage] with one of "
                f"{len(self._stages)} stages"
            )
        self._optimizer.load_state_dict({**state_dict, "state": states})
        self._place.copy_(place)
        self.post_load_state_dict()

    def post_load_state_dict(self) -> None:
        """Set the learning rate for the loaded step."""
        super().post_load_state_dict()
        self._set_rate()
