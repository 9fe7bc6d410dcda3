"""The socket beside gRPC's port: who may ask, what ends a connection, and that who asked is always told, once."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from recinfer.errors import UnavailableError
from recinfer.serving.server.security import Security
from recinfer.serving.shards import transport as module
from recinfer.serving.shards.frames import frame
from recinfer.serving.shards.transport import AnswerSockets, AskSocket
from tests.ports import free_port
from tests.serving.asked import LONG, MUCH, Answers, ask, into
from tests.serving.remote.fleet import asking, shard, until, write_shards
from tests.serving.remote.test_direct import make_archive

MOST = 1000
TOKEN = "a-token-of-24-characters"


@contextmanager
def served(token: str | None = None) -> Iterator[tuple[Answers, AnswerSockets]]:
    answers = Answers()
    server = AnswerSockets("127.0.0.1", 0, answers.each, token, MOST)
    try:
        yield answers, server
    finally:
        answers.go_on.set()
        server.close()


def opened(server: AnswerSockets, token: str | None = None, server_id: bytes | None = None) -> AskSocket:
    way = AskSocket("127.0.0.1", server.port, server_id or server.server_id, token)
    until(lambda: way.is_open or way.is_over)
    return way


def test_one_question_after_another():
    with served() as (_, server):
        way = opened(server)
        for question in (b"x", b"", b"y" * MOST):
            assert ask(way, question) == (question * 2, "OK", "")
        assert len(ask(way, b"much")[0] or b"") == MUCH
        assert way.close()
        until(lambda: way.is_over and not server._trusted)
        assert not way.ask(b"x", time.monotonic() + LONG, into()[1])


@pytest.mark.parametrize("token", [None, "another-token-of-the-same", TOKEN])
def test_a_token_is_proved(token: str | None):
    with served(TOKEN) as (answers, server):
        way = opened(server, token)
        if token == TOKEN:
            assert ask(way, b"x") == (b"xx", "OK", "")
        else:
            until(lambda: way.is_over)
            assert answers.asked.empty()


def test_a_token_that_nobody_asks_for_is_no_fault():
    with served() as (_, server):
        assert ask(opened(server, TOKEN), b"x") == (b"xx", "OK", "")


def test_a_token_is_never_sent():
    """Somebody who listens in its place, and does not know who it was, is told nothing at all."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        way = AskSocket("127.0.0.1", listener.getsockname()[1], bytes(32), TOKEN)
        there, _ = listener.accept()
        with there:
            there.sendall(frame(module._HELLO + bytes(31) + b"x" + bytes(32)))
            assert there.recv(100) == b""
        until(lambda: way.is_over)
    with served(TOKEN) as (_, server):
        way = opened(server, TOKEN, bytes(32))
        assert way.is_over and way.code == "UNAVAILABLE"


def test_who_is_not_there_or_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_CONNECT_S", 0.1)
    assert AskSocket("127.0.0.1", free_port(), bytes(32), None).code in ("", "UNAVAILABLE")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        way = AskSocket("127.0.0.1", listener.getsockname()[1], bytes(32), None)
        until(lambda: way.is_over)
        assert way.code == "UNAVAILABLE"


def talk(server: AnswerSockets, *data: bytes, token: str | None = None) -> bytes:
    """What an asker of one's own hears, who proves its token when ``data`` begins with None."""
    with socket.create_connection(("127.0.0.1", server.port), LONG) as sock:
        greeting = module._exactly(sock, 4 + len(module._HELLO) + 64)
        if token is not None:
            sock.sendall(frame(module._HELLO + module._proof(token, greeting[-64:])))
        try:
            for each in data:
                sock.sendall(each)
            sock.shutdown(socket.SHUT_WR)
            found = b""
            while more := sock.recv(1 << 20):
                found += more
            return found
        except OSError:  # reset
            return b""


def test_a_proof_is_of_one_connection():
    with served(TOKEN) as (answers, server):
        assert talk(server, frame(b"x"), token=TOKEN) == frame(b"xx")
        proofs = [module._proof(TOKEN, server.server_id + bytes(32)), bytes(32), b"", TOKEN.encode()]
        for proof in proofs:
            assert talk(server, frame(module._HELLO + proof), frame(b"no")) == b""
            assert talk(server, frame(proof), frame(b"no")) == b""
        assert talk(server, frame(b"no")) == b""
        assert answers.asked.get() == b"x" and answers.asked.empty()


def test_junk_and_what_is_too_long_end_a_connection_alone():
    draw = random.Random(0)
    with served() as (_, server):
        way = opened(server)
        for number in range(300):
            junk = draw.randbytes(draw.choice([1, 4, 60, 3000]))
            talk(server, junk, token=None if number % 2 else "")
        assert talk(server, frame(bytes(MOST + 1)), token="") == b""
        assert ask(way, b"x") == (b"xx", "OK", "")
        until(lambda: not server._silent and len(server._trusted) == 1)


def test_who_asks_on_and_never_reads_costs_one_answer():
    with served() as (answers, server), socket.create_connection(("127.0.0.1", server.port), LONG) as sock:
        greeting = module._exactly(sock, 4 + len(module._HELLO) + 64)
        sock.sendall(frame(module._HELLO + module._proof(None, greeting[-64:])))
        sock.sendall(frame(b"much"))
        until(lambda: not answers.asked.empty())
        for _ in range(50):
            sock.sendall(frame(b"much"))
        way = opened(server)
        for _ in range(10):  # whatever else had been read by now would have been asked
            assert ask(way, b"x") == (b"xx", "OK", "")
        assert [answers.asked.get() for _ in range(answers.asked.qsize())] == [b"much", *[b"x"] * 10]


def test_what_is_answered_later_holds_up_nobody():
    with served() as (answers, server):
        way, ends_reply = opened(server), into()
        assert way.ask(b"later", time.monotonic() + LONG, ends_reply[1])
        assert ask(opened(server), b"x") == (b"xx", "OK", "")
        answers.go_on.set()
        assert ends_reply[0].get(timeout=LONG) == (b"later" * 2, "OK", "")
        assert ask(way, b"x") == (b"xx", "OK", "")


def test_who_asks_on_before_a_later_answer_is_ended():
    with served() as (answers, server):
        assert talk(server, frame(b"later"), frame(b"x"), token="") == b""
        assert answers.asked.get(timeout=LONG) == b"later" and answers.asked.empty()
        until(lambda: not server._trusted)
        answers.go_on.set()  # its answer finds nobody
        assert ask(opened(server), b"x") == (b"xx", "OK", "")


def test_who_has_proved_nothing_is_given_no_memory():
    with served() as (_, server), socket.create_connection(("127.0.0.1", server.port), LONG) as sock:
        server._most = 1 << 30
        module._exactly(sock, 4 + len(module._HELLO) + 64)
        until(lambda: len(server._silent) == 1)
        (frames,) = server._silent
        sock.sendall(frame(bytes(module._PROOF_BYTES + 1))[:4])
        until(lambda: not server._silent)
        assert frames._frame is None
        assert sock.recv(1) == b""


def test_connections_that_say_nothing_make_room_for_others():
    with served() as (_, server):
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(module._SILENT + 20)]
        way = opened(server)
        assert ask(way, b"x") == (b"xx", "OK", "")
        until(lambda: len(server._silent) <= module._SILENT)
        for sock in idle:
            sock.close()
        until(lambda: not server._silent)


def test_a_server_that_stops_tells_who_waits():
    with served() as (answers, server):
        idle, busy = opened(server), opened(server)
        ends, reply = into()
        assert busy.ask(b"wait", time.monotonic() + LONG, reply)
        assert answers.asked.get(timeout=LONG) == b"wait"
        threading.Timer(0.1, answers.go_on.set).start()
        server.close()
        assert ends.get(timeout=LONG)[1] in ("OK", "UNAVAILABLE")
        until(lambda: idle.is_over and busy.is_over)


def test_a_port_that_is_taken_is_named():
    with served() as (_, server), pytest.raises(UnavailableError, match=f"127.0.0.1:{server.port}"):
        AnswerSockets("127.0.0.1", server.port, bytes, None, MOST)


@pytest.mark.parametrize("token", [None, TOKEN])
def test_rankers_find_it(tmp_path: Path, token: str | None):
    archive, port = make_archive(tmp_path, "row_wise"), free_port()
    security = Security(token=token)
    (tmp_path / "token").write_text(TOKEN)
    settings: dict[str, Any] = {} if token is None else {"token_file": str(tmp_path / "token")}
    path = write_shards(tmp_path / "shards.json", {rank: [f"127.0.0.1:{port}"] for rank in (0, 1, 2)}, **settings)

    def way(fan_out: Any) -> AskSocket:
        (replica,) = fan_out.pool.everyone()
        until(lambda: replica.up)
        ends, reply = into()
        assert replica.quick.ask(b"", time.monotonic() + LONG, reply)
        assert ends.get(timeout=LONG)[1] == "INVALID_ARGUMENT"
        until(lambda: any(each.is_open for each in replica.quick._ways))
        return next(each for each in replica.quick._ways if each.is_open)

    fixed = free_port()
    with (
        shard(archive, (0, 1, 2), port=port, security=security, socket_port=fixed) as server,
        asking(path) as fan_out,
    ):
        first = way(fan_out)
        assert server.socket_port == fixed == first._address[1]
        assert isinstance(first, AskSocket)
        assert ask(first, b"")[1] == "OK"  # a failure is a message here
        server.stop()
        until(lambda: first.is_over)
        with shard(archive, (0, 1, 2), port=port, security=security):
            until(lambda: fan_out.pool.everyone()[0].up)
            second = way(fan_out)
            assert isinstance(second, AskSocket) and second is not first, "it has another port and another name"
