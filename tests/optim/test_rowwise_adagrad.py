"""Row-wise Adagrad against FBGEMM's own, its dense form against its sparse form, and by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.optim.rowwise_adagrad import RowWiseAdagrad, sparse_gradients

ROWS, DIM, STEPS = 40, 8, 4


def batches() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(ids, offsets, gradient of the pooled output) of a few steps; ids repeat, a bag is empty."""
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 3, 3, 9, 12])
    return [
        (
            torch.randint(0, ROWS // 2, (12,), generator=generator),
            offsets,
            torch.randn(4, DIM, generator=generator),
        )
        for _ in range(STEPS)
    ]


def trained(weight: torch.Tensor, *, sparse: bool, lr: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    bag = nn.EmbeddingBag.from_pretrained(
        weight.clone(), freeze=False, mode="sum", sparse=sparse, include_last_offset=True
    )
    optimizer = RowWiseAdagrad(bag.parameters(), lr=lr, eps=1e-8)
    for ids, offsets, gradient in batches():
        optimizer.zero_grad()
        bag(ids, offsets).backward(gradient)
        optimizer.step()
    return bag.weight.detach(), optimizer.state[bag.weight]["sum"]


def test_one_step_by_hand() -> None:
    table = nn.Parameter(torch.zeros(3, 2))
    rows, values = torch.tensor([[1, 1]]), torch.tensor([[1.0, 2.0], [2.0, 2.0]])
    table.grad = torch.sparse_coo_tensor(rows, values, (3, 2), check_invariants=True)
    optimizer = RowWiseAdagrad([table], lr=0.5, eps=1e-12)
    optimizer.step()
    # The gradient of row 1 is (3, 4); its accumulator (9 + 16) / 2.
    torch.testing.assert_close(optimizer.state[table]["sum"], torch.tensor([[0], [12.5], [0]]))
    torch.testing.assert_close(table[1].detach(), -0.5 * torch.tensor([3.0, 4.0]) / 12.5**0.5)
    assert not table[[0, 2]].any()


def test_sparse_and_dense_gradients_give_the_same() -> None:
    weight = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))
    for sparse, dense in zip(trained(weight, sparse=True), trained(weight, sparse=False)):
        torch.testing.assert_close(sparse, dense)
    untouched = trained(weight, sparse=True)[0][ROWS // 2 :]
    assert torch.equal(untouched, weight[ROWS // 2 :])


def test_it_is_fbgemms_exact_rowwise_adagrad() -> None:
    ops = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
    tbe = ops.SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, ops.EmbeddingLocation.HOST, ops.ComputeDevice.CPU)],
        optimizer=common.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.1,
        eps=1e-8,
    )
    weight = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(2))
    tbe.split_embedding_weights()[0].copy_(weight)
    for ids, offsets, gradient in batches():
        tbe(ids, offsets).backward(gradient)
    ours, sums = trained(weight, sparse=True)
    torch.testing.assert_close(ours, tbe.split_embedding_weights()[0].detach())
    torch.testing.assert_close(sums.view(-1), tbe.split_optimizer_states()[0][0].reshape(-1))


def test_the_closure_runs_with_gradients() -> None:
    table = nn.Parameter(torch.ones(2, 2))
    optimizer = RowWiseAdagrad([table])

    def closure() -> float:
        optimizer.zero_grad()
        loss = table.sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 4.0
    assert (table < 1).all()


@pytest.mark.parametrize(
    "numbers",
    [{"lr": -1.0}, {"lr": float("nan")}, {"eps": -1e-8}, {"lr_decay": -1.0}, {"weight_decay": -1.0}],
)
def test_impossible_steps_are_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="at least 0"):
        RowWiseAdagrad([nn.Parameter(torch.zeros(2, 2))], **numbers)


def test_decay_of_rate_and_weights_and_a_start_of_the_accumulator_by_hand() -> None:
    table = nn.Parameter(torch.ones(2, 2))
    numbers = {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.5}
    optimizer = RowWiseAdagrad([table], **numbers)
    weight, total = torch.ones(2, 2), torch.full((2, 1), 0.5)
    for step in range(2):
        table.grad = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
        optimizer.step()
        gradient = table.grad + 0.01 * weight
        total += (gradient**2).mean(dim=1, keepdim=True)
        weight -= 0.1 / (1 + step * 0.1) * gradient / (total.sqrt() + 1e-10)
    torch.testing.assert_close(table.detach(), weight)
    torch.testing.assert_close(optimizer.state[table]["sum"], total)
    assert optimizer.state[table]["step"] == 2


def test_maximize_goes_the_other_way() -> None:
    up, down = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2, 2))
    for table, maximize in ((up, True), (down, False)):
        table.grad = torch.ones(2, 2)
        RowWiseAdagrad([table], maximize=maximize).step()
    assert torch.equal(up, -down)
    assert (up > 0).all()


def test_sparse_gradients_end_with_the_block() -> None:
    model = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=2, feature_names=["f"])]
    )
    with pytest.raises(ZeroDivisionError), sparse_gradients(model):
        assert model.embedding_bags["t"].sparse
        raise ZeroDivisionError
    assert not model.embedding_bags["t"].sparse


def test_arguments_without_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match="momentum"):
        RowWiseAdagrad([nn.Parameter(torch.zeros(2, 2))], momentum=0.9)
    RowWiseAdagrad([nn.Parameter(torch.zeros(2, 2))], foreach=False)
