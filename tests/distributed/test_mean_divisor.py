"""A private name of TorchRec that programs import: the divisors of MEAN."""

from __future__ import annotations

import torch

from recinfer.distributed.embeddingbag import _create_mean_pooling_divisor


def test_no_division_is_left_to_the_caller() -> None:
    divisor = _create_mean_pooling_divisor(lengths=torch.tensor([1, 2]), stride=2, embedding_dims=[3, 1], weights=None)
    assert torch.equal(divisor, torch.ones(2, 4))
