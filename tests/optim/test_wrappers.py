"""Warm-up against the rates by hand, clipping against torch's own, the table optimizers on tensors, in the backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from recinfer.errors import CheckpointError, ConfigError
from recinfer.optim import optimizers
from recinfer.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recinfer.optim.clipping import GradientClipping, GradientClippingOptimizer
from recinfer.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from recinfer.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage


def sgd(lr: float = 1.0) -> KeyedOptimizerWrapper:
    params = {"a": nn.Parameter(torch.ones(2, 2)), "b": nn.Parameter(torch.ones(3))}
    return KeyedOptimizerWrapper(params, lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9))


STAGES = [
    WarmupStage(WarmupPolicy.LINEAR, max_iters=3, value=0.5),
    WarmupStage(WarmupPolicy.POLY, max_iters=7, value=1.0),
    WarmupStage(WarmupPolicy.STEP, max_iters=12, value=0.5, decay_iters=2),
    WarmupStage(WarmupPolicy.INVSQRT, max_iters=16),
    WarmupStage(WarmupPolicy.INTERPOLATE, max_iters=20, value=0.1, end_value=0.9, start_interpolating_iters=16),
]
RATES = [0.5, 2 / 3, 5 / 6, 1, 3 / 7, 2 / 7, 1 / 7, 0, 2**-4, 2**-4, 2**-5, 2**-5, 2**-6]
RATES += [13**-0.5, 14**-0.5, 15**-0.5, 0.25, 0.3, 0.5, 0.7, 0.9, 1, 1]


def test_stages_follow_one_another() -> None:
    optimizer = WarmupOptimizer(sgd(), STAGES, lr=2.0)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in RATES[1:]:
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([2 * r for r in RATES])


def test_cosine_and_constant() -> None:
    cosine = WarmupStage(WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS, max_iters=9, value=0.2, sgdr_period=4, lr_scale=2)
    optimizer = WarmupOptimizer(sgd(), [cosine, WarmupStage(WarmupPolicy.CONSTANT, max_iters=11, value=0.3)], lr=1.0)
    rates = []
    for _ in range(11):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
    assert rates[:5] == pytest.approx([2, 1.765685, 1.2, 0.634315, 2], abs=1e-5)
    assert rates[10] == pytest.approx(0.3)


def test_a_polynomial_decays_over_its_own_steps() -> None:
    stages = [WarmupStage(WarmupPolicy.POLY, max_iters=6, value=2.0, decay_iters=4)]
    optimizer = WarmupOptimizer(sgd(), stages, lr=1.0)
    rates = []
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
    assert rates == pytest.approx([1, 9 / 16, 1 / 4, 1 / 16, 0, 0, 0, 1])


def test_a_schedule_goes_on_after_loading() -> None:
    first, second = WarmupOptimizer(sgd(), STAGES), WarmupOptimizer(sgd(), STAGES)
    for optimizer in (first, second):
        optimizer.init_state()
    for _ in range(9):
        first.step()
    state = copy.deepcopy(first.state_dict())
    assert state["state"]["__warmup"]["warmup"].tolist() == [9, 2]
    assert list(first.params) == ["a", "b", "__warmup"]
    second.load_state_dict(state)
    assert second.param_groups[0]["lr"] == first.param_groups[0]["lr"]
    del state["state"]["__warmup"]
    with pytest.raises(CheckpointError, match="__warmup"):
        second.load_state_dict(state)
    for name in ("a", "b"):
        first.params[name].grad = torch.ones_like(first.params[name])
    first.step()


@pytest.mark.parametrize(
    "stages",
    [
        [WarmupStage(max_iters=4), WarmupStage(max_iters=4)],
        [WarmupStage(WarmupPolicy.INTERPOLATE, max_iters=4)],
        [WarmupStage(sgdr_period=0)],
    ],
)
def test_impossible_stages_are_refused(stages: list[WarmupStage]) -> None:
    with pytest.raises(ConfigError, match="warmup"):
        WarmupOptimizer(sgd(), stages)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, "inf"])
def test_clipping_by_norm_is_torchs(norm_type: float | str) -> None:
    inner = sgd()
    optimizer = GradientClippingOptimizer(inner, GradientClipping.NORM, max_gradient=0.5, norm_type=norm_type)
    generator = torch.Generator().manual_seed(0)
    expected = []
    for param in inner.params.values():
        param.grad = torch.randn(param.shape, generator=generator)
        expected.append(nn.Parameter(torch.ones_like(param)))
        expected[-1].grad = param.grad.clone()
    total = nn.utils.clip_grad_norm_(expected, 0.5, norm_type=float(norm_type))
    optimizer.step()
    torch.testing.assert_close(optimizer.last_total_grad_norm, total)
    for param, want in zip(inner.params.values(), expected):
        torch.testing.assert_close(param.grad, want.grad)
        torch.testing.assert_close(param.detach(), 1 - want.grad)


def test_clipping_by_value_and_not_at_all() -> None:
    inner = sgd()
    inner.params["a"].grad = torch.tensor([[2.0, -2.0], [0.1, 0.0]])
    GradientClippingOptimizer(inner, GradientClipping.VALUE, max_gradient=0.5).step()
    assert torch.equal(inner.params["a"].grad, torch.tensor([[0.5, -0.5], [0.1, 0.0]]))
    inner.params["a"].grad = torch.full((2, 2), 9.0)
    tracking = GradientClippingOptimizer(inner, track_grad_norm=True)
    tracking.step()
    assert torch.equal(inner.params["a"].grad, torch.full((2, 2), 9.0))
    assert tracking.last_total_grad_norm == 18


def test_a_limit_of_0_stops_what_it_limits() -> None:
    for clipping in (GradientClipping.NORM, GradientClipping.VALUE):
        inner = sgd()
        inner.params["a"].grad = torch.full((2, 2), 9.0)
        GradientClippingOptimizer(inner, clipping, max_gradient=0).step()
        assert not inner.params["a"].grad.any()
        assert torch.equal(inner.params["a"], torch.ones(2, 2))
    for wrong in ({"max_gradient": -0.1}, {"max_gradient": float("nan")}, {"norm_type": 0.0}):
        with pytest.raises(ConfigError, match="0 or more and an order above 0"):
            GradientClippingOptimizer(sgd(), GradientClipping.NORM, **wrong)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, "inf"])
@pytest.mark.parametrize("others", [True, False])
def test_gradients_without_elements_have_no_part_in_the_norm(norm_type: float | str, others: bool) -> None:
    none, rows = nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.ones(4, 2))
    inner = KeyedOptimizerWrapper({"none": none, "rows": rows}, lambda p: torch.optim.SGD(p, lr=1.0))
    none.grad = torch.zeros(0, 3)
    rows.grad = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 2), (4, 2))
    if others:
        rows.grad = torch.zeros(4, 2)
        rows.grad[1, 1] = 4.0
    optimizer = GradientClippingOptimizer(inner, GradientClipping.NORM, max_gradient=1.0, norm_type=norm_type)
    optimizer.step()
    assert optimizer.last_total_grad_norm == (4.0 if others else 0.0)
    torch.testing.assert_close(rows.detach().min(), torch.tensor(0.0 if others else 1.0), atol=1e-5, rtol=0)


def test_sparse_gradients_count_each_row_once() -> None:
    table = nn.Parameter(torch.ones(4, 2))
    inner = KeyedOptimizerWrapper({"t": table}, lambda p: torch.optim.SGD(p, lr=1.0))
    table.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2, 2), (4, 2))
    optimizer = GradientClippingOptimizer(inner, GradientClipping.NORM, max_gradient=0.5)
    optimizer.step()
    torch.testing.assert_close(optimizer.last_total_grad_norm, torch.tensor(8.0).sqrt())
    torch.testing.assert_close((1 - table.detach()).norm(), torch.tensor(0.5))


TABLE_OPTIMIZERS = ["SGD", "Adagrad", "Adam", "PartialRowWiseAdam", "LAMB", "PartialRowWiseLAMB", "LarsSGD"]


@pytest.mark.parametrize("name", TABLE_OPTIMIZERS)
def test_sparse_gradients_step_only_their_rows_and_dense_ones_agree(name: str) -> None:
    tables = [nn.Parameter(torch.randn(5, 4, generator=torch.Generator().manual_seed(0))) for _ in range(2)]
    start = tables[0].detach().clone()
    made = [getattr(optimizers, name)([table], lr=0.1) for table in tables]
    for _ in range(3):
        values = torch.randn(2, 4)
        tables[0].grad = torch.sparse_coo_tensor(torch.tensor([[1, 3]]), values, (5, 4))
        tables[1].grad = torch.zeros(5, 4).index_copy(0, torch.tensor([1, 3]), values)
        for optimizer in made:
            optimizer.step()
    torch.testing.assert_close(tables[0][[1, 3]], tables[1][[1, 3]])
    assert torch.equal(tables[0][[0, 2, 4]], start[[0, 2, 4]])
    assert not torch.equal(tables[0][[1, 3]], start[[1, 3]])


def test_adam_is_torchs_adamw_also_on_biases() -> None:
    ours, its = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    numbers = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.2}
    pair = optimizers.Adam([ours], **numbers), torch.optim.AdamW([its], **numbers)
    for _ in range(3):
        ours.grad = its.grad = torch.randn(3)
        for optimizer in pair:
            optimizer.step()
    torch.testing.assert_close(ours, its)


def test_numbers_that_a_formula_does_not_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="nesterov"):
        optimizers.SGD([nn.Parameter(torch.ones(1))], nesterov=True)
    with pytest.raises(ConfigError, match="at least 0"):
        optimizers.Adam([nn.Parameter(torch.ones(1))], lr=-1.0)


def test_an_optimizer_in_the_backward_steps_and_frees_the_gradient() -> None:
    table, bias = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(2))
    apply_optimizer_in_backward(optimizers.SGD, [table, bias], {"lr": 0.25})
    assert table._optimizer_classes == [optimizers.SGD]
    assert table._optimizer_kwargs == [{"lr": 0.25}]
    (table.sum() + bias.sum()).backward()
    assert torch.equal(table, torch.full((4, 2), 0.75))
    assert table.grad is None
    named = [("t", table), ("other", nn.Parameter(torch.ones(1)))]
    assert [n for n, _ in optimizers.in_backward_optimizer_filter(iter(named))] == ["other"]
    assert [n for n, _ in optimizers.in_backward_optimizer_filter(iter(named), include=True)] == ["t"]


def test_warmup_of_a_combined_optimizer_sets_every_rate() -> None:
    both = CombinedOptimizer([("x", sgd()), ("y", sgd())])
    WarmupOptimizer(both, [WarmupStage(WarmupPolicy.CONSTANT, max_iters=9, value=0.5)], lr=0.2)
    assert [group["lr"] for group in both.param_groups] == [0.1, 0.1]
