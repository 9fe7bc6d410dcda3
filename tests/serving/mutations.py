"""Almost valid messages, for endpoints that take bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator


def mutated(chosen: random.Random, starts: list[bytes], count: int) -> Iterator[bytes]:
    """``count`` messages, each one of ``starts`` with one to three bytes or ranges of bytes changed, removed or added."""
    for _ in range(count):
        data = bytearray(chosen.choice(starts))
        for _ in range(chosen.randint(1, 3)):
            at = chosen.randrange(len(data))
            kind = chosen.random()
            if kind < 0.6:
                data[at] = chosen.choice([0, 1, 2, 0x7F, 0x80, 0xFF, chosen.randrange(256)])
            elif kind < 0.8:
                del data[at : at + chosen.randint(1, 9)]
            else:
                data[at:at] = chosen.randbytes(chosen.randint(1, 9))
        yield bytes(data)
