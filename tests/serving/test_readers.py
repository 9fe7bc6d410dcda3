"""The compiled readers of requests accept no bytes that protobuf refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from recinfer.serving.shards._ranks import read_find
from recinfer.serving.wire._wire import read_request

from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.serving.wire.proto import shards_pb2 as shards_pb

_USER = pb.JaggedFeatures(keys=["user"], batch_size=1, lengths=b"\1\0\0\0", values=bytes(8))
_ITEMS = pb.JaggedFeatures(keys=["item", "shop"], batch_size=2, lengths=bytes(16))
_PART = shards_pb.ShardPart(rank=1, module=2, length_bytes=4, lengths=bytes(8), ids=bytes(8))
PREDICT = pb.PredictRequest(model="m", version="1", features=_ITEMS, dense=bytes(8), context=_USER)
FIND = shards_pb.ShardRequest(version="k", batch_size=2, parts=[_PART, _PART], stored=True)


@pytest.mark.parametrize(("read", "message"), [(read_request, PREDICT), (read_find, FIND)])
def test_numbers_in_more_bytes_than_they_need(read: Callable[[bytes], Any], message: Any) -> None:
    """Each byte in turn as the first of a longer varint; protobuf refuses tags of more than five bytes."""
    data = message.SerializeToString()
    assert read(data) is not None
    refused = 0
    for at in range(len(data)):
        for more in range(9):
            longer = data[:at] + bytes([data[at] | 0x80]) + b"\x80" * more + b"\0" + data[at + 1 :]
            try:
                type(message).FromString(longer)
            except DecodeError:
                refused += 1
                assert read(longer) is None, (at, more)
    assert refused > len(data)
