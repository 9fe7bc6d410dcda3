"""Keyed optimizers: state by parameter names, loading that checks before it changes anything, parts as one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from recinfer.errors import CheckpointError, ConfigError
from recinfer.optim.fused import EmptyFusedOptimizer
from recinfer.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper


def adam(names: str = "ab", value: float = 1.0) -> KeyedOptimizerWrapper:
    params = {name: nn.Parameter(torch.full((2, 2), value)) for name in names}
    return KeyedOptimizerWrapper(params, lambda p: torch.optim.Adam(p, lr=0.1))


def stepped(optimizer: KeyedOptimizer, times: int = 1) -> KeyedOptimizer:
    for _ in range(times):
        for param in optimizer.params.values():
            param.grad = torch.ones_like(param)
        optimizer.step()
    return optimizer


def test_state_is_keyed_by_names_and_goes_on_where_it_was() -> None:
    first = stepped(adam())
    state = copy.deepcopy(first.state_dict())
    assert set(state) == {"state"}
    assert set(state["state"]) == {"a", "b"}
    assert set(state["state"]["a"]) == {"step", "exp_avg", "exp_avg_sq"}
    second = adam()
    second.init_state()
    with torch.no_grad():
        for name, param in second.params.items():
            param.copy_(first.params[name])
    second.load_state_dict(state)
    stepped(first)
    stepped(second)
    for name, param in first.params.items():
        assert torch.equal(param, second.params[name])


def test_init_state_moves_nothing() -> None:
    optimizer = adam()
    optimizer.init_state()
    assert all(torch.equal(p, torch.ones(2, 2)) and p.grad is None for p in optimizer.params.values())
    assert optimizer.state_dict()["state"]["a"]["step"] == 0
    assert optimizer.param_groups[0]["lr"] == 0.1
    sparse = KeyedOptimizerWrapper({"t": nn.Parameter(torch.ones(3, 2))}, lambda p: torch.optim.SGD(p, lr=0.1))
    sparse.init_state({"t"})
    assert torch.equal(sparse.params["t"], torch.ones(3, 2))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda s: s["state"].pop("a"), r"missing \['a'\]"),
        (lambda s: s["state"].update(z={}), r"unexpected \['z'\]"),
        (lambda s: s["state"]["a"].pop("exp_avg"), r"state of a.*missing \['exp_avg'\]"),
        (lambda s: s["state"]["b"].update(extra=1), r"state of b.*unexpected \['extra'\]"),
        (lambda s: s["state"]["b"].update(exp_avg=torch.ones(3)), r"b: exp_avg.*\(3,\)"),
        (lambda s: s.pop("state"), "expected 'state'"),
        (lambda s: s.pop("param_groups"), "expected 'param_groups'"),
        (lambda s: s["param_groups"][0].update(params=["a"]), r"param_groups.*missing \['a/b'\]"),
        (lambda s: s["param_groups"][0].pop("lr"), r"missing \['lr'\]"),
        (lambda s: s["param_groups"].append(s["param_groups"][0]), "got 2 param_groups"),
    ],
)
def test_what_does_not_match_is_named_and_nothing_changes(change: Any, named: str) -> None:
    optimizer = stepped(adam())
    optimizer.save_param_groups(True)
    wrong = copy.deepcopy(stepped(adam(), 3).state_dict())
    wrong["param_groups"] = copy.deepcopy(optimizer.state_dict()["param_groups"])
    change(wrong)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointError, match=named):
        optimizer.load_state_dict(wrong)
    after = optimizer.state_dict()
    for name, state in before["state"].items():
        assert all(torch.equal(value, after["state"][name][key]) for key, value in state.items())


def test_saved_groups_bring_their_rate() -> None:
    optimizer = stepped(adam())
    optimizer.save_param_groups(True)
    state = copy.deepcopy(optimizer.state_dict())
    assert state["param_groups"][0]["params"] == ["a", "b"]
    state["param_groups"][0]["lr"] = 0.7
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.7


class Statistics:
    """State of an optimizer that saves and loads itself, as a matrix preconditioner does."""

    def __init__(self, seen: int) -> None:
        self.seen = torch.tensor(seen)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.copy_(state["seen"])


def test_objects_of_the_state_save_and_load_themselves() -> None:
    def made(seen: int) -> KeyedOptimizer:
        param = nn.Parameter(torch.ones(2))
        state = {param: {"own": Statistics(seen), "nested": {"deep": Statistics(seen + 1)}, "count": seen}}
        return KeyedOptimizer({"a": param}, state, [{"params": [param], "lr": 0.1}])

    first, second = made(3), made(7)
    state = copy.deepcopy(first.state_dict())
    assert state == {"state": {"a": {"own": {"seen": 3}, "nested": {"deep": {"seen": 4}}, "count": 3}}}
    (held,) = second.state.values()
    for optimizer in (second, CombinedOptimizer([second]), OptimizerWrapper(second)):
        held["own"].seen.fill_(7)
        held["count"] = 7
        optimizer.load_state_dict(state)
        assert held["own"].seen == 3 and held["nested"]["deep"].seen == 4 and held["count"] == 3
        assert isinstance(held["own"], Statistics)


def test_a_group_without_names_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="CombinedOptimizer"):
        adam().add_param_group({"params": []})
    with pytest.raises(ConfigError, match="not among the parameters"):
        KeyedOptimizer({"a": torch.ones(1)}, {}, [{"params": [torch.ones(1)]}])


def test_combined_names_prefixes_and_rates() -> None:
    one, two = stepped(adam()), stepped(adam("c"))
    both = CombinedOptimizer([("x", one), two])
    assert set(both.params) == {"x.a", "x.b", "c"} == set(both.state_dict()["state"])
    assert [name for name, _ in both.optimizers] == ["x", ""]
    for group in both.param_groups:
        group["lr"] = 0.5
    assert one.param_groups[0]["lr"] == two.param_groups[0]["lr"] == 0.5
    both.update_hyper_parameters({"lr": 0.25})
    assert one.param_groups[0]["lr"] == 0.25
    other = CombinedOptimizer([("x", stepped(adam())), stepped(adam("c"))])
    stepped(both)
    other.load_state_dict(copy.deepcopy(both.state_dict()))
    assert torch.equal(other.state_dict()["state"]["c"]["exp_avg"], both.state_dict()["state"]["c"]["exp_avg"])
    both.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in both.params.values())
    with pytest.raises(ConfigError, match="two parameters have the name 'a'"):
        CombinedOptimizer([adam(), adam()])


def test_a_wrapper_shares_all() -> None:
    inner = stepped(adam())
    outer = OptimizerWrapper(inner)
    assert outer.params is inner.params
    assert outer.param_groups is inner.param_groups
    stepped(outer)
    assert outer.state_dict()["state"]["a"]["step"] == 2
    outer.load_state_dict(copy.deepcopy(stepped(adam()).state_dict()))
    assert inner.state_dict()["state"]["a"]["step"] == 1


def test_schedulers_of_torch_take_keyed_optimizers() -> None:
    optimizer = adam()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    stepped(optimizer)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_the_empty_fused_optimizer_does_nothing() -> None:
    empty = EmptyFusedOptimizer()
    empty.step()
    empty.zero_grad()
    empty.init_state()
    assert empty.state_dict() == {"state": {}}
