"""Optimizers whose state is keyed by parameter names, so that a checkpoint is independent of order and sharding.

A state dict is ``{"state": {parameter name: {state name: value}}}``, with ``"param_groups"`` if requested. Values may
be tensors, ShardedTensors, DTensors, numbers or dictionaries of these; loading copies in place. An
object of the state that has ``state_dict`` and ``load_state_dict`` saves and loads itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.optim import Optimizer

from recinfer.errors import CheckpointError, ConfigError
from recinfer.optim.keyed_state import check_names, checked_copies, saved

__all__ = ["CombinedOptimizer", "KeyedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper"]

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class KeyedOptimizer(Optimizer):
    """An optimizer with named parameters.

    Args:
        params: name -> parameter (a tensor or ShardedTensor).
        state: parameter -> its state.
        param_groups: the hyper-parameters, as torch keeps them; set ``param_groups[i]["lr"]`` to change the rate.

    Raises:
        ConfigError: state or groups of parameters that ``params`` does not name.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor | ShardedTensor],
        state: Mapping[Any, Any],
        param_groups: Collection[Mapping[str, Any]],
    ) -> None:
        # torch's __init__ is not called: it takes no ShardedTensors, and groups and state exist already.
        for hooks in _HOOKS:
            self.__dict__[hooks] = OrderedDict()
        self.defaults: dict[str, Any] = {"_save_param_groups": False}
        self._set_parts(params, state, param_groups)
        known = {id(p) for p in params.values()}
        stray = [key for key in state if id(key) not in known]
        stray += [p for group in param_groups for p in group["params"] if id(p) not in known]
        if stray:
            raise ConfigError(
                f"{type(self).__name__}: {len(stray)} tensors of state or param_groups are not among the parameters "
                f"{list(params)}; name all of them in params"
            )

    def __getstate__(self) -> dict[str, Any]:
        # torch's method keeps three attributes and loses the names; copies need all attributes.
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def _set_parts(self, params: Any, state: Any, param_groups: Any) -> None:
        self.params = params
        self.state = state
        self.param_groups = param_groups

    # ------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The state by parameter name; with :meth:`save_param_groups` also the groups, with sorted parameter names."""
        result: dict[str, Any] = {"state": {name: saved(values) for name, values in self._state_by_name().items()}}
        if self.defaults["_save_param_groups"]:
            names = {id(param): name for name, param in self.params.items()}
            result["param_groups"] = [
                {**group, "params": sorted(names[id(p)] for p in group["params"])} for group in self.param_groups
            ]
        return result

    def own_state_names(self) -> set[str]:
        """The names of parameters that no model has: they carry a state of the optimizer alone."""
        return set()

    def _state_by_name(self) -> dict[str, Any]:
        state = self.state
        return {name: state[param] for name, param in self.params.items() if param in state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load the state in place, and the hyper-parameters if :meth:`save_param_groups` is on.

        Raises:
            CheckpointError: parameters, state or groups that are missing, unexpected or of another shape; the message
                names them, and nothing has been changed.
        """
        own, given = self._state_by_name(), dict(state_dict)
        wanted = ["state", *(["param_groups"] if self.defaults["_save_param_groups"] else [])]
        for part in wanted:
            if part not in given:
                raise CheckpointError(f"optimizer state: got the keys {sorted(given)}; expected {part!r}")
        check_names("parameters", own, given["state"])
        copies = [copy for name, values in own.items() for copy in self._plan(name, values, given["state"][name])]
        groups = self._matched_groups(given["param_groups"]) if "param_groups" in wanted else []
        for copy in copies:
            copy()
        for group, new in groups:
            group.update({key: value for key, value in new.items() if key != "params"})
        self.post_load_state_dict()

    def _optional_state(self, key: str) -> bool:
        """Whether the loaded state dict may lack a state, which is then unchanged."""
        return False

    def _plan(self, name: str, own: Any, given: Any) -> Iterable[Callable[[], Any]]:
        """Check ``given`` and return the functions that copy it into ``own``."""
        optional = [key for key in own if key not in given and self._optional_state(str(key))]
        check_names(f"state of {name}", {k: None for k in own if k not in optional}, given)
        for key in own:
            if key in given:
                yield from checked_copies(f"{name}: {key}", own, key, given[key])

    def _matched_groups(self, given: Collection[Mapping[str, Any]]) -> list[tuple[Any, Mapping[str, Any]]]:
        names = {id(param): name for name, param in self.params.items()}
        by_params = {"/".join(sorted(group["params"])): group for group in given}
        pairs = []
        own = {"/".join(sorted(names[id(p)] for p in group["params"])): group for group in self.param_groups}
        check_names("param_groups", own, by_params)
        if len(given) != len(self.param_groups):
            raise CheckpointError(f"optimizer: got {len(given)} param_groups; expected {len(self.param_groups)}")
        for key, group in own.items():
            check_names(f"param_group {key}", group, by_params[key])
            pairs.append((group, by_params[key]))
        return pairs

    def post_load_state_dict(self) -> None:
        """Called after a state dict is loaded; subclasses update what depends on it."""

    def save_param_groups(self, save: bool) -> None:
        """Set whether :meth:`state_dict` contains the groups and :meth:`load_state_dict` requires them."""
        self.defaults["_save_param_groups"] = save

    # ------------------------------------------------------------------------------------------------- set-up

    def add_param_group(self, param_group: Any) -> None:
        """Not supported by keyed optimizers.

        Raises:
            NotImplementedError: always: a group's parameters have no names. Make another optimizer and combine them.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not support add_param_group, because its parameters would have no names; "
            f"create another KeyedOptimizer and combine them with CombinedOptimizer"
        )

    @torch.no_grad()
    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Create the state that the first step would create; parameters, gradients and step counts are unchanged.

        Args:
            sparse_grad_parameter_names: parameters whose gradients are sparse.
        """
        sparse = sparse_grad_parameter_names or set()
        before = {name: (param, param.grad) for name, param in self.params.items() if param.requires_grad}
        rates = [group.get("lr") for group in self.param_groups]
        for name, (param, _) in before.items():
            zero = torch.zeros_like(param)
            param.grad = zero.to_sparse(1) if name in sparse else zero
        try:
            for group in self.param_groups:
                if "lr" in group:
                    group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
            self.step(closure=None)
        finally:
            for group, rate in zip(self.param_groups, rates):
                if "lr" in group:
                    group["lr"] = rate
            for param, grad in before.values():
                param.grad = grad
        for param, _ in before.values():
            step = self.state.get(param, {}).get("step")
            if isinstance(step, Tensor):
                step.zero_()

    # ------------------------------------------------------------------------------------------------- reports

    def set_optimizer_step(self, step: int) -> None:
        """Set the step number of optimizers that count steps themselves."""

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Set hyper-parameters (``{"lr": 0.1}``) of every group that has them."""
        for group in self.param_groups:
            for key, value in params_dict.items():
                if key in group:
                    group[key] = value  # type: ignore[index]

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__}("]
        for number, group in enumerate(self.param_groups):
            settings = ", ".join(f"{key}={value}" for key, value in group.items() if key != "params")
            lines.append(f"  group {number}: {len(group['params'])} parameters, {settings}")
        return "\n".join([*lines, ")"])


class CombinedOptimizer(KeyedOptimizer):
    """Several keyed optimizers as one.

    Args:
        optims: optimizers, or ``(prefix, optimizer)``; the parameters of the latter are named ``prefix.name``.

    Raises:
        ConfigError: two parameters of one name, or an optimizer that saves its own param_groups (ask this one to).
    """

    def __init__(self, optims: Sequence[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
        self._optims = [o if isinstance(o, tuple) else ("", o) for o in optims]
        for hooks in _HOOKS:
            self.__dict__[hooks] = OrderedDict()
        self.defaults = {"_save_param_groups": False}
        seen: set[str] = set()
        for prefix, optimizer in self._optims:
            if optimizer.defaults["_save_param_groups"]:
                raise ConfigError("CombinedOptimizer: call save_param_groups on the combined optimizer, not on a part")
            for key in optimizer.params:
                name = self.prepend_opt_key(key, prefix)
                if name in seen:
                    raise ConfigError(
                        f"CombinedOptimizer: two parameters have the name {name!r}; give an optimizer a prefix"
                    )
                seen.add(name)

    def __repr__(self) -> str:
        return "\n".join(f"{prefix}: {optimizer!r}" for prefix, optimizer in self._optims)

    @property
    def optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        """Prefix and optimizer of each part."""
        return self._optims

    @staticmethod
    def prepend_opt_key(name: str, opt_key: str) -> str:
        """``opt_key.name``, or ``name`` without a key."""
        return f"{opt_key}.{name}" if opt_key else name

    def own_state_names(self) -> set[str]:
        """The names of every part, with their prefixes."""
        return {self.prepend_opt_key(name, prefix) for prefix, o in self._optims for name in o.own_state_names()}

    @property
    def params(self) -> Mapping[str, Tensor | ShardedTensor]:  # type: ignore[override]
        """All parameters by prefixed name."""
        return {self.prepend_opt_key(k, prefix): p for prefix, o in self._optims for k, p in o.params.items()}

    @property
    def state(self) -> Mapping[Tensor, Any]:  # type: ignore[override]
        """All parameters' state."""
        return {param: value for _, o in self._optims for param, value in o.state.items()}

    @property
    def param_groups(self) -> Collection[Mapping[str, Any]]:  # type: ignore[override]
        """The groups of all parts; the same dictionaries, so that setting a learning rate takes effect."""
        return [group for _, o in self._optims for group in o.param_groups]

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the gradients of all parts."""
        for _, optimizer in self._optims:
            optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every part."""
        for _, optimizer in self._optims:
            optimizer.step(closure=closure)

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Create the state of every part; names have their prefixes."""
        names = sparse_grad_parameter_names or set()
        for prefix, optimizer in self._optims:
            own = {k for k in optimizer.params if self.prepend_opt_key(k, prefix) in names}
            optimizer.init_state(own)

    def _optional_state(self, key: str) -> bool:
        return any(optimizer._optional_state(key) for _, optimizer in self._optims)

    def post_load_state_dict(self) -> None:
        """Forward to every part."""
        for _, optimizer in self._optims:
            optimizer.post_load_state_dict()

    def set_optimizer_step(self, step: int) -> None:
        """Forward to every part."""
        for _, optimizer in self._optims:
            optimizer.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Forward to every part."""
        for _, optimizer in self._optims:
            optimizer.update_hyper_parameters(params_dict)


class KeyedOptimizerWrapper(KeyedOptimizer):
    """A torch optimizer with named parameters.

    Args:
        params: name -> parameter.
        optim_factory: makes the optimizer of a list of parameters (with ``pass_params_dict``, of ``params``).
        pass_params_dict: give the factory the dictionary.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor | ShardedTensor],
        optim_factory: Callable[[Any], Optimizer],
        pass_params_dict: bool = False,
    ) -> None:
        self._optimizer = optim_factory(params if pass_params_dict else list(params.values()))
        super().__init__(params, self._optimizer.state, self._optimizer.param_groups)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the gradients."""
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the wrapped optimizer."""
        self._optimizer.step(closure=closure)


class OptimizerWrapper(KeyedOptimizer):
    """Base class of optimizers that wrap another keyed optimizer and share its parameters, state and groups."""

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        self._optimizer = optimizer
        for hooks in _HOOKS:
            self.__dict__[hooks] = OrderedDict()
        self.defaults = {"_save_param_groups": False}
        self._set_parts(optimizer.params, optimizer.state, optimizer.param_groups)

    def __repr__(self) -> str:
        return repr(self._optimizer)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the gradients."""
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the wrapped optimizer."""
        self._optimizer.step(closure=closure)

    def add_param_group(self, param_group: Any) -> None:
        """Forward to the wrapped optimizer."""
        self._optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's state."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load the wrapped optimizer's state."""
        self._optimizer.load_state_dict(state_dict)
        self.post_load_state_dict()

    def own_state_names(self) -> set[str]:
        """Those of the wrapped optimizer."""
        return self._optimizer.own_state_names()

    def _optional_state(self, key: str) -> bool:
        return self._optimizer._optional_state(key)

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Create the wrapped optimizer's state."""
        self._optimizer.init_state(sparse_grad_parameter_names)

    def post_load_state_dict(self) -> None:
        """Forward to the wrapped optimizer."""
        self._optimizer.post_load_state_dict()

    def save_param_groups(self, save: bool) -> None:
        """Forward to the wrapped optimizer."""
        self._optimizer.save_param_groups(save)

    def set_optimizer_step(self, step: int) -> None:
        """Forward to the wrapped optimizer."""
        self._optimizer.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Forward to the wrapped optimizer."""
        self._optimizer.update_hyper_parameters(params_dict)
