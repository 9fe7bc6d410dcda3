"""Kept outputs: after the first calls, large lookups touch no new page."""

from __future__ import annotations

import platform

import pytest

from recinfer.errors import ConfigError
from recinfer.quant.outputs import keep_outputs
from tests.warm import run_program

FAULTS = """
import ctypes, resource, sys, threading, torch
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.quant.embedding_modules import EmbeddingBagCollection
from recinfer.quant.outputs import keep_outputs
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
torch.set_num_threads(1)
assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0  # PR_SET_THP_DISABLE: pages of one size, whatever the machine prefers
keep = sys.argv[1] == "keep"
if keep:
    assert keep_outputs()
tables = [EmbeddingBagConfig(num_embeddings=8, embedding_dim=256, name=f"t{i}", feature_names=[f"f{i}"]) for i in range(8)]
module = EmbeddingBagCollection(tables, False)
ids = torch.zeros(8 * 6000, dtype=torch.int64)  # 49 MB of output: above what malloc keeps by itself
request = KeyedJaggedTensor([f"f{i}" for i in range(8)], ids, lengths=torch.ones(8 * 6000, dtype=torch.int32))
pages = 8 * 6000 * 256 * 4 // resource.getpagesize()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        module(request)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10 / pages
def calls():
    parts = [faults()]
    while len(parts) < 3 or (keep and parts[-1] > 0.08 and len(parts) < 20):  # until freed neighbours have grown together
        parts.append(faults())
    print(*parts)
thread = threading.Thread(target=calls)  # as in a server
thread.start()
thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="keeping freed outputs is a setting of glibc's allocator")
def test_a_large_output_is_mapped_once() -> None:
    def faults(how: str) -> list[float]:
        """Pages that a call touched for the first time, as a part of its output's: averages of ten calls each."""
        code, out, err = run_program(FAULTS, how)
        assert code == 0, err
        return [float(part) for part in out.split()]

    assert min(faults("not")) > 0.83
    assert faults("keep")[-1] < 0.083


def test_sizes_that_malloc_cannot_take_are_refused() -> None:
    for size in (0, 1 << 31):
        with pytest.raises(ConfigError, match=f"max_bytes is {size}; expected 1 to 2147483647"):
            keep_outputs(size)
