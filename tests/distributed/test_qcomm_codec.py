"""Codecs alone, and under every collective on real ranks: numbers within the format's precision, sizes as they say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fbgemm_gpu.quantize_comm import QuantizedCommCodec as FbgemmCodec
from fbgemm_gpu.split_embedding_configs import SparseType
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recinfer.distributed import comm_ops
from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recinfer.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsCodec,
    QCommsConfig,
    get_qcomm_codecs,
    get_qcomm_codecs_registry,
)
from recinfer.distributed.planner.model.facts import _comm_bytes
from recinfer.distributed.types import CommOp, NoOpQuantizedCommCodec, QuantizedCommCodec, QuantizedCommCodecs
from recinfer.errors import ConfigError
from tests.distributed.spawn import run_ranks

# Largest error, relative to the largest number of a row (or to the number itself for fp16 and bf16).
PRECISION = {
    CommType.FP16: 2**-11,
    CommType.BF16: 2**-8,
    CommType.INT8: 2 / 255 / 2 * 1.01,
    CommType.FP8: 2**-4,
}
KINDS = list(PRECISION)
ROWS = {CommType.FP8: 64}  # without rows FP8 has no scale


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=30)
@given(length=st.integers(0, 200), scale=st.sampled_from([1e-3, 1.0, 1e3]), seed=st.integers(0, 99))
def test_a_codec_keeps_the_precision_of_its_format(kind: CommType, length: int, scale: float, seed: int) -> None:
    codec = QCommsCodec(kind, row_dim=ROWS.get(kind))
    numbers = scale * torch.randn(length, generator=torch.Generator().manual_seed(seed))
    context = codec.create_context()
    sent = codec.encode(numbers, context)
    assert sent.dtype == codec.quantized_dtype
    assert sent.numel() == codec.calc_quantized_size(length, context)
    back = codec.decode(sent, context)
    assert back.dtype == torch.float32
    assert not back[length:].any() or kind is CommType.INT8
    largest = numbers.abs().max().item() if length else 0.0
    assert torch.all((back[:length] - numbers).abs() <= PRECISION[kind] * largest + 1e-12)


def test_sizes() -> None:
    for kind, expected in {CommType.FP16: 100, CommType.BF16: 100, CommType.INT8: 144, CommType.FP8: 136}.items():
        assert QCommsCodec(kind, row_dim=ROWS.get(kind)).calc_quantized_size(100) == expected
    assert QCommsCodec(CommType.INT8, row_dim=32).calc_quantized_size(64) == 2 * 40


def test_a_row_has_a_scale_of_its_own() -> None:
    numbers = torch.cat([torch.full((64,), 1e4), torch.linspace(-1e-3, 1e-3, 64)])
    for kind in (CommType.INT8, CommType.FP8):
        codec = QCommsCodec(kind, row_dim=ROWS.get(kind))
        back = codec.decode(codec.encode(numbers))
        assert (back[64:] - numbers[64:]).abs().max() < 1e-4


@pytest.mark.parametrize("shape", [(6,), (2, 3), (0, 3), (2, 1, 5)])
def test_fp8_without_rows_keeps_the_shape(shape: tuple[int, ...]) -> None:
    """As TorchRec's: one byte a number, 3 bits of mantissa, no scale."""
    with pytest.warns(UserWarning, match="fp8_quantize_dim=64"):
        codecs = get_qcomm_codecs(QCommsConfig(CommType.FP8, CommType.FP8))
    numbers = 0.2 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for codec in (codecs.forward, codecs.backward):
        context = codec.create_context()
        sent = codec.encode(numbers, context)
        assert (sent.shape, sent.dtype) == (numbers.shape, torch.uint8)
        assert codec.calc_quantized_size(numbers.numel(), context) == numbers.numel()
        torch.testing.assert_close(codec.decode(sent, context), numbers, rtol=2**-4, atol=2**-16)
        torch.testing.assert_close(
            codec.decode(codec.encode(torch.tensor([1.5, -7.0]))), torch.tensor([0.9375, -0.9375])
        )


def test_fp8_gradients_have_range_or_precision_as_asked() -> None:
    numbers = torch.linspace(0.5, 1.0, 64)
    errors = {}
    for three in (False, True):
        config = QCommsConfig(backward_precision=CommType.FP8, fp8_bwd_uses_143=three, fp8_quantize_dim=32)
        codec = get_qcomm_codecs(config).backward
        assert codec.calc_quantized_size(64, codec.create_context()) == 2 * 36
        back = codec.decode(codec.encode(numbers, codec.create_context()), codec.create_context())
        errors[three] = (back - numbers).abs().max().item()
    assert errors[True] < 0.6 * errors[False]


def test_loss_scale_saves_small_gradients_in_half() -> None:
    small = torch.tensor([1e-8, -2e-8])
    lost = get_qcomm_codecs(QCommsConfig(backward_precision=CommType.FP16)).backward
    assert not lost.decode(lost.encode(small)).any()
    saved = get_qcomm_codecs(QCommsConfig(backward_precision=CommType.FP16, backward_loss_scale=1024.0)).backward
    torch.testing.assert_close(saved.decode(saved.encode(small)), small, rtol=5e-3, atol=0)
    huge = saved.decode(saved.encode(torch.tensor([1e30, -1e30])))
    torch.testing.assert_close(huge, torch.tensor([65504.0, -65504.0]) / 1024)


def test_configs_and_registries() -> None:
    both = get_qcomm_codecs(None)
    assert isinstance(both.forward, NoOpQuantizedCommCodec) and isinstance(both.backward, NoOpQuantizedCommCodec)
    config = QCommsConfig(forward_precision=CommType.BF16)
    both = get_qcomm_codecs(config)
    assert isinstance(both.forward, QCommsCodec) and both.forward.quantized_dtype == torch.bfloat16
    assert isinstance(both.backward, NoOpQuantizedCommCodec)
    assert get_qcomm_codecs_registry(QCommsConfig()) is None
    assert get_qcomm_codecs_registry(config).keys() == {op.name for op in CommOp}  # type: ignore[union-attr]
    some = get_qcomm_codecs_registry(config, [CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL], torch.device("cpu"))
    assert some is not None and list(some) == ["POOLED_EMBEDDINGS_ALL_TO_ALL"]
    assert str(CommType.INT8) == "int8"


@pytest.mark.parametrize(
    "settings_,message",
    [
        ({"forward_precision": CommType.MX4}, "MX4 is not supported; use INT8 or FP8"),
        ({"fp8_quantize_dim": 32}, "with precisions fp32 and fp32; they are for fp8 only"),
        ({"forward_precision": CommType.FP16, "forward_loss_scale": 0.0}, "forward_loss_scale is 0.0"),
    ],
)
def test_configs_that_do_not_hold_together(settings_: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QCommsConfig(**settings_)


def test_codecs_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match="fp32 has no codec"):
        QCommsCodec(CommType.FP32)
    with pytest.raises(ConfigError, match="rows of 6 numbers; expected a multiple of 4"):
        QCommsCodec(CommType.INT8, row_dim=6)


def test_no_op_sends_numbers_as_they_are() -> None:
    codec = NoOpQuantizedCommCodec()
    numbers = torch.randn(3)
    assert codec.create_context() is None and codec.quantized_dtype() == torch.float32
    assert codec.decode(codec.encode(numbers)) is numbers and codec.calc_quantized_size(3) == 3
    with pytest.raises(NotImplementedError, match="QuantizedCommCodec must implement calc_quantized_size"):
        QuantizedCommCodec().calc_quantized_size(1)


# ------------------------------------------------------------------------------------- under the collectives


def operations(rank: int, world: int) -> dict[str, tuple[Tensor, Callable]]:
    """Every collective with sizes that no row divides, a rank that sends nothing among them."""
    batches, dims = [3, 2, 4][:world], [5, 7, 3][:world]
    random = torch.Generator().manual_seed(rank)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    rows = [2 * world + 1, *[1] * (world - 2), 0] if world > 1 else [2]
    counts = [[(q + r) % 3 for r in range(world)] for q in range(world)]  # rows rank q sends to rank r
    ops: dict[str, tuple[Tensor, Callable]] = {
        "pooled": (made(sum(batches), dims[rank]), lambda x, c: comm_ops.alltoall_pooled(x, batches, dims, codecs=c)),
        "variable": (
            made(sum(batches) * dims[rank]),
            lambda x, c: comm_ops.variable_batch_alltoall_pooled(
                x, [[b] for b in batches], [batches[rank]] * world, [[d] for d in dims], codecs=c
            ),
        ),
        "sequence": (
            made(sum(counts[rank]), 9),
            lambda x, c: comm_ops.alltoall_sequence(
                x, None, None, torch.ones(1), [counts[q][rank] for q in range(world)], counts[rank], codecs=c
            ),
        ),
        "tables": (made(7, dims[rank]), lambda x, c: comm_ops.alltoallv([x], dims, codecs=c)),
        "base": (made(3 * world, 11), lambda x, c: comm_ops.reduce_scatter_base_pooled(x, codecs=c)),
        "v": (made(sum(rows), 11), lambda x, c: comm_ops.reduce_scatter_v_pooled(x, rows, codecs=c)),
        "list": (made(3, world), lambda x, c: comm_ops.reduce_scatter_pooled(list(x.unbind(1)), codecs=c)),
        "gather": (made(5, 7), lambda x, c: comm_ops.all_gather_base_pooled(x, codecs=c)),
    }
    return ops


def with_codecs(rank: int, world: int, forward: str, backward: str) -> None:
    rows = 64 if "fp8" in (forward, backward) else None
    codecs = get_qcomm_codecs(QCommsConfig(CommType(forward), CommType(backward), fp8_quantize_dim=rows))
    compare(rank, world, codecs, PRECISION.get(CommType(forward), 0.0), PRECISION.get(CommType(backward), 0.0))


def compare(rank: int, world: int, codecs: QuantizedCommCodecs, forward: float, backward: float) -> None:
    for name, (x, operation) in operations(rank, world).items():
        results = []
        for used in (None, codecs):
            leaf = x.clone().requires_grad_()
            out = operation(leaf, used).wait()
            out = torch.cat(out, dim=1) if isinstance(out, list) else out
            # Gradients of about 1, so that errors compare to 1.
            (out * torch.linspace(0.5, 1.0, out.numel()).view_as(out)).sum().backward()
            assert leaf.grad is not None
            results.append((out.detach(), leaf.grad))
        (plain, plain_grad), (shrunk, shrunk_grad) = results
        largest = 4.0  # of the numbers that are sent
        assert shrunk.shape == plain.shape and shrunk.dtype == torch.float32
        assert (shrunk - plain).abs().max() <= world * forward * largest if plain.numel() else True, name
        if plain_grad.numel():
            assert (shrunk_grad - plain_grad).abs().max() <= (world if name == "gather" else 1) * backward, name
            assert backward == 0.0 or plain_grad.abs().max() > backward


@pytest.mark.parametrize(
    "forward,backward",
    [("fp16", "fp16"), ("bf16", "bf16"), ("int8", "int8"), ("fp8", "fp8"), ("int8", "fp16"), ("fp32", "bf16")],
)
@pytest.mark.parametrize("world", [2, 3])
def test_collectives_with_codecs(world: int, forward: str, backward: str) -> None:
    run_ranks(world, with_codecs, forward, backward)


def with_fbgemm_codec(rank: int, world: int) -> None:
    codecs = QuantizedCommCodecs(FbgemmCodec(SparseType.INT8), FbgemmCodec(SparseType.FP16))  # type: ignore[arg-type]
    compare(rank, world, codecs, PRECISION[CommType.INT8], PRECISION[CommType.FP16])


def test_collectives_with_fbgemm_s_codecs() -> None:
    run_ranks(2, with_fbgemm_codec)


def test_the_planner_counts_the_bytes_that_codecs_send() -> None:
    registry = get_qcomm_codecs_registry(QCommsConfig(CommType.INT8, CommType.FP32))
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)
    assert _comm_bytes(sharder, 2.0, pooled=True) == (1.0, 4.0, 1.0, 4.0)
    assert _comm_bytes(EmbeddingBagCollectionSharder(), 2.0, pooled=True) == (2.0,) * 4
