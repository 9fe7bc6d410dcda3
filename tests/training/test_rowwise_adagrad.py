"""Row-wise Adagrad against FBGEMM's own, its dense form against its sparse form, and by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.training.rowwise_adagrad import RowWiseAdagrad, sparse_gradients

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
    optimizer = RowWiseAdagrad(bag.parameters(), lr=lr)
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
    torch.testing.assert_close(optimizer.state[table]["sum"], torch.tensor([0, 12.5, 0]))
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
    torch.testing.assert_close(sums, tbe.split_optimizer_states()[0][0].reshape(-1))


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


@pytest.mark.parametrize(("lr", "eps"), [(0.0, 1e-8), (-1.0, 1e-8), (0.1, 0.0), (float("nan"), 1e-8)])
def test_steps_that_cannot_be_are_refused(lr: float, eps: float) -> None:
    with pytest.raises(ConfigError, match="expected both above 0"):
        RowWiseAdagrad([nn.Parameter(torch.zeros(2, 2))], lr=lr, eps=eps)


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shape \(2,\)"):
        RowWiseAdagrad([nn.Parameter(torch.zeros(2))])


def test_sparse_gradients_end_with_the_block() -> None:
    model = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=2, feature_names=["f"])]
    )
    with pytest.raises(ZeroDivisionError), sparse_gradients(model):
        assert model.embedding_bags["t"].sparse
        raise ZeroDivisionError
    assert not model.embedding_bags["t"].sparse
