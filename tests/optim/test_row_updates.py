"""The formulas of the table optimizers: against torch's own, against loops written out, and where they divide by 0."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from recinfer.optim.row_updates import UPDATES, Hyper

ROWS, DIM, STEPS = 5, 3, 4


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(ROWS, DIM, generator=generator) for _ in range(STEPS)]


def start() -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(4))


def stepped(name: str, hyper: Hyper) -> Tensor:
    weights = start()
    states = {n: torch.zeros(ROWS if rowwise else (ROWS, DIM)) for n, rowwise in UPDATES[name].states.items()}
    for t, gradient in enumerate(gradients(), start=1):
        weights = UPDATES[name].step(weights, gradient, states, hyper, t)
    return weights


def by_torch(make: Callable[[Tensor], torch.optim.Optimizer]) -> Tensor:
    weights = torch.nn.Parameter(start())
    optimizer = make(weights)
    for gradient in gradients():
        weights.grad = gradient.clone()
        optimizer.step()
    return weights.detach()


@pytest.mark.parametrize(
    ("name", "hyper", "make"),
    [
        ("SGD", Hyper(0.1), lambda w: torch.optim.SGD([w], lr=0.1)),
        ("SGD", Hyper(0.1, weight_decay=0.2, weight_decay_mode="none"), lambda w: torch.optim.SGD([w], lr=0.1)),
        (
            "SGD",
            Hyper(0.1, weight_decay=0.2, weight_decay_mode="l2"),
            lambda w: torch.optim.SGD([w], lr=0.1, weight_decay=0.2),
        ),
        ("ADAGRAD", Hyper(0.1, eps=1e-3), lambda w: torch.optim.Adagrad([w], lr=0.1, eps=1e-3)),
        (
            "ADAGRAD",
            Hyper(0.1, eps=1e-3, weight_decay=0.2, weight_decay_mode="l2"),
            lambda w: torch.optim.Adagrad([w], lr=0.1, eps=1e-3, weight_decay=0.2),
        ),
        ("ADAM", Hyper(0.1, eps=1e-3), lambda w: torch.optim.Adam([w], lr=0.1, eps=1e-3)),
        (
            "ADAM",
            Hyper(0.1, beta1=0.7, beta2=0.8, weight_decay=0.2),
            lambda w: torch.optim.AdamW([w], lr=0.1, betas=(0.7, 0.8), weight_decay=0.2),
        ),
    ],
)
def test_what_torch_has_too(name: str, hyper: Hyper, make: Callable[[Tensor], torch.optim.Optimizer]) -> None:
    torch.testing.assert_close(stepped(name, hyper), by_torch(make))


def written_out(name: str, hyper: Hyper) -> Tensor:
    """Row by row and element by element, in doubles."""
    out = []
    for r, row in enumerate(start().double().tolist()):
        w, m, v, total = list(row), [0.0] * DIM, [0.0] * DIM, 0.0
        for t, gradient in enumerate(gradients(), start=1):
            g = gradient[r].double().tolist()
            mean_square = sum(x * x for x in g) / DIM
            if name == "ROWWISE_ADAGRAD":
                l2 = hyper.weight_decay if hyper.weight_decay_mode == "l2" else 0.0
                seen = [x + l2 * y for x, y in zip(g, w)]
                total += sum(x * x for x in seen) / DIM
                keep = 1 - hyper.lr * hyper.weight_decay if hyper.weight_decay_mode == "decouple" else 1.0
                w = [keep * y - hyper.lr / (math.sqrt(total) + hyper.eps) * x for x, y in zip(seen, w)]
                continue
            norm_w, norm_g = math.hypot(*w), math.hypot(*g)
            if name == "LARS_SGD":
                rate = hyper.lr * hyper.eta * norm_w / (norm_g + hyper.weight_decay * norm_w)
                m = [hyper.momentum * a + rate * (x + hyper.weight_decay * y) for a, x, y in zip(m, g, w)]
                w = [y - a for y, a in zip(w, m)]
                continue
            squares = [mean_square] * DIM if "PARTIAL" in name else [x * x for x in g]
            m = [hyper.beta1 * a + (1 - hyper.beta1) * x for a, x in zip(m, g)]
            v = [hyper.beta2 * a + (1 - hyper.beta2) * x for a, x in zip(v, squares)]
            direction = [
                a / (1 - hyper.beta1**t) / (math.sqrt(b / (1 - hyper.beta2**t)) + hyper.eps) + hyper.weight_decay * y
                for a, b, y in zip(m, v, w)
            ]
            ratio = norm_w / math.hypot(*direction) if "LAMB" in name else 1.0
            w = [y - hyper.lr * ratio * d for y, d in zip(w, direction)]
        out.append(w)
    return torch.tensor(out, dtype=torch.float32)


@pytest.mark.parametrize(
    "name", ["ROWWISE_ADAGRAD", "PARTIAL_ROWWISE_ADAM", "LAMB", "PARTIAL_ROWWISE_LAMB", "LARS_SGD"]
)
@pytest.mark.parametrize("mode", ["none", "l2", "decouple"])
def test_the_rest_written_out(name: str, mode: str) -> None:
    hyper = Hyper(0.1, eps=1e-4, beta1=0.8, beta2=0.9, weight_decay=0.3, weight_decay_mode=mode, momentum=0.7, eta=0.5)
    torch.testing.assert_close(stepped(name, hyper), written_out(name, hyper))


def test_max_norm_limits_every_row() -> None:
    limited = stepped("ROWWISE_ADAGRAD", Hyper(0.1, max_norm=0.5))
    assert (limited.norm(dim=1) <= 0.5 + 1e-6).all()


@pytest.mark.parametrize("name", sorted(UPDATES))
def test_rows_of_zeros_without_gradient_stay_numbers(name: str) -> None:
    states = {n: torch.zeros(2 if rowwise else (2, 3)) for n, rowwise in UPDATES[name].states.items()}
    new = UPDATES[name].step(torch.zeros(2, 3), torch.zeros(2, 3), states, Hyper(0.1), 1)
    assert torch.equal(new, torch.zeros(2, 3))
