"""The framed transport: messages in pieces of any size, authentication, what ends a connection, and that each request gets
one response or error."""

from __future__ import annotations

import asyncio
import queue
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from recinfer.errors import UnavailableError
from recinfer.serving.engine.memory_budget import MemoryBudget
from recinfer.serving.server.security import Security
from recinfer.serving.shards import frames
from recinfer.serving.shards import transport as module
from recinfer.serving.shards.frames import ShardsThread
from recinfer.serving.shards.transport import ShardAddress, ShardConnection, ShardListener, rankers_thread
from recinfer.serving.wire.tls import load_pem
from tests.certificates import certified, need_openssl
from tests.ports import free_port
from tests.serving.remote.fleet import asking, shard, write_shards
from tests.serving.remote.test_direct import make_archive
from tests.waiting import until

LONG = 60.0
MOST = 1000
MUCH = 20 << 20
TOKEN = "a-token-of-24-characters"
REFUSED = b"too many"
HEAD_BYTES = 12

End = tuple["bytes | None", str, str]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is given up because the machine is busy."""
    monkeypatch.setattr(module, "_CONNECT_S", LONG)
    monkeypatch.setattr(module, "_HANDSHAKE_S", LONG)


def frame(number: int, message: bytes) -> bytes:
    """``message`` as it travels."""
    return struct.pack("<IQ", len(message), number) + message


class Answers:
    """Records requests and answers them at once on the listener's thread, except "later"."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.go_on = threading.Event()

    def answer(self, request: bytes, reply: Callable[[bytes], None]) -> None:
        self.asked.put(request)
        if request == b"fail":
            raise RuntimeError("a secret")
        if request.startswith(b"later"):
            threading.Thread(target=self._later, args=(request, reply)).start()
        else:
            reply(bytes(MUCH) if request == b"much" else request * 2)

    def _later(self, request: bytes, reply: Callable[[bytes], None]) -> None:
        assert self.go_on.wait(LONG)
        reply(bytes(MUCH) if request == b"later much" else request * 2)


@contextmanager
def listening(
    token: str | None = None, tls: Any = None, budget: MemoryBudget | None = None
) -> Iterator[tuple[Answers, ShardListener]]:
    answers, tokens = Answers(), () if token is None else (token,)
    listener = ShardListener(
        "127.0.0.1",
        0,
        answers.answer,
        lambda _: REFUSED,
        tokens=lambda: tokens,
        max_request_bytes=MOST,
        tls=tls,
        budget=budget,
    )
    try:
        yield answers, listener
    finally:
        answers.go_on.set()
        listener.close()


class Asker:
    """A ranker's connection, and the results of its requests."""

    def __init__(
        self, listener: ShardListener, token: str | None = None, server_id: bytes | None = None, **address: Any
    ) -> None:
        where = ShardAddress("127.0.0.1", listener.port, server_id or listener.server_id, MOST)._replace(**address)
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.connection = ShardConnection(where, token, 2 * MUCH, lambda connection: self.lost.put(connection.why))

    def open(self, tls: Any = None, tls_name: str = "") -> Asker:
        asyncio.run(self.connection.connect(tls, tls_name))
        return self

    def begin(self, request: bytes, seconds: float = LONG) -> tuple[queue.SimpleQueue[End], Callable[[], None]]:
        """Where its end comes, and what makes it forgotten."""
        ends: queue.SimpleQueue[End] = queue.SimpleQueue()
        forget: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

        def ask() -> None:
            forget.put(self.connection.call(request, time.monotonic() + seconds, lambda *end: ends.put(end)))
            assert ends.empty(), "it is told before it knows that it has asked"

        rankers_thread().call(ask)
        forgets = forget.get(timeout=LONG)
        return ends, lambda: rankers_thread().call(forgets)

    def ask(self, request: bytes) -> End:
        """Ask and wait."""
        return self.begin(request)[0].get(timeout=LONG)

    def close(self) -> None:
        rankers_thread().call(self.connection.end, "closed")


def test_requests_of_any_size():
    with listening() as (_, listener):
        asker = Asker(listener).open()
        for request in (b"x", b"", b"y" * MOST):
            assert asker.ask(request) == (request * 2, "OK", "")
        assert len(asker.ask(b"much")[0] or b"") == MUCH
        message, code, details = asker.ask(bytes(MOST + 1))
        assert (message, code) == (None, "INVALID_ARGUMENT") and f"at most {MOST} may come" in details
        assert asker.ask(b"x") == (b"xx", "OK", "")
        asker.close()
        until(lambda: not listener.thread.connections)
        assert asker.ask(b"x")[:2] == (None, "UNAVAILABLE")


def test_responses_that_nobody_reads_are_bounded():
    budget = MemoryBudget(3 * MUCH)
    with listening(budget=budget) as (answers, listener):
        asker = Asker(listener).open()
        ends = [asker.begin(b"later much")[0] for _ in range(10)]
        for _ in ends:
            answers.asked.get(timeout=LONG)
        paused = threading.Event()
        rankers_thread().call(asker.connection._transport.pause_reading)
        rankers_thread().call(paused.set)
        assert paused.wait(LONG)
        answers.go_on.set()
        until(lambda: budget.refused == 8)
        assert budget.held >= 2 * MUCH  # of the other two
        rankers_thread().call(asker.connection._transport.resume_reading)
        found = [end.get(timeout=LONG) for end in ends]
        assert {end[1:] for end in found} == {("OK", "")}
        sizes = [len(end[0] or b"") for end in found]
        assert sorted(sizes) == [len(REFUSED)] * 8 + [MUCH] * 2
        until(lambda: budget.held == 0)
        asker.close()


@pytest.mark.parametrize("request_bytes", [b"x", b"fail", b"much"])
def test_finished_request_frees_its_memory(request_bytes: bytes):
    budget = MemoryBudget(3 * MUCH)
    with listening(budget=budget) as (_, listener):
        asker = Asker(listener).open()
        asker.ask(request_bytes)
        until(lambda: budget.held == 0)
        asker.close()


def test_answers_come_in_any_order():
    with listening() as (answers, listener):
        asker = Asker(listener).open()
        late = [asker.begin(b"later %d" % number)[0] for number in range(20)]
        for number in range(100):
            request = b"%d" % number
            assert asker.ask(request) == (request * 2, "OK", "")
        assert all(ends.empty() for ends in late)
        answers.go_on.set()
        for number, ends in enumerate(late):
            assert ends.get(timeout=LONG) == (b"later %d" % number * 2, "OK", "")


def test_request_past_its_deadline_fails_and_its_late_answer_is_dropped():
    with listening() as (answers, listener):
        asker = Asker(listener).open()
        expired, _ = asker.begin(b"later 1", 0.0)
        forgotten, forget = asker.begin(b"later 2")
        forget()
        assert expired.get(timeout=LONG)[:2] == (None, "DEADLINE_EXCEEDED")
        waits, _ = asker.begin(b"later 3")
        answers.go_on.set()
        assert waits.get(timeout=LONG) == (b"later 3" * 2, "OK", "")
        assert asker.ask(b"x") == (b"xx", "OK", "")
        assert expired.empty() and forgotten.empty() and not asker.connection._pending


def test_unanswered_requests_of_a_connection_are_bounded():
    with listening() as (answers, listener):
        asker = Asker(listener).open()
        first, _ = asker.begin(b"later" + bytes(MOST - 10))
        assert asker.ask(bytes(6)) == (REFUSED, "OK", "")
        assert Asker(listener).open().ask(b"x") == (b"xx", "OK", "")
        answers.go_on.set()
        assert first.get(timeout=LONG)[1] == "OK"
        assert asker.ask(bytes(6)) == (bytes(12), "OK", "")


def test_waiting_requests_fail_when_the_server_stops_or_fails():
    for how in ("stop", "fail"):
        with listening() as (answers, listener):
            asker = Asker(listener).open()
            ends, _ = asker.begin(b"later")
            assert answers.asked.get(timeout=LONG) == b"later"
            if how == "stop":
                listener.close()
            else:
                failed = asker.ask(b"fail")
                assert failed[:2] == (None, "UNAVAILABLE") and "secret" not in failed[2]
            assert ends.get(timeout=LONG)[:2] == (None, "UNAVAILABLE")
            assert asker.lost.get(timeout=LONG) and asker.lost.empty() and not asker.connection.is_open


# -- authentication ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, "another-token-of-the-same", TOKEN])
def test_a_token_is_proved(token: str | None):
    with listening(TOKEN) as (answers, listener):
        asker = Asker(listener, token).open()
        if token == TOKEN:
            assert asker.ask(b"x") == (b"xx", "OK", "")
        else:
            assert asker.ask(b"x")[:2] == (None, "UNAVAILABLE")
            assert answers.asked.empty()


def test_token_that_the_server_does_not_need_is_accepted():
    with listening() as (_, listener):
        assert Asker(listener, TOKEN).open().ask(b"x") == (b"xx", "OK", "")


def test_a_token_is_never_sent():
    """A listener at the server's address that does not know the server's id gets no data at all."""
    with listening(TOKEN) as (_, listener), pytest.raises(UnavailableError, match="another server"):
        Asker(listener, TOKEN, server_id=bytes(32)).open()
    with socket.create_server(("127.0.0.1", 0)) as other, listening() as (_, listener):
        asker = Asker(listener, TOKEN, port=other.getsockname()[1])
        refused: queue.SimpleQueue[bytes] = queue.SimpleQueue()

        def accept() -> None:
            there, _ = other.accept()
            with there:
                there.sendall(frame(0, module._HELLO + bytes(64)))
                there.settimeout(LONG)
                try:
                    refused.put(there.recv(100))
                except ConnectionError:
                    refused.put(b"")

        threading.Thread(target=accept).start()
        with pytest.raises(UnavailableError, match="another server"):
            asker.open()
        assert refused.get(timeout=LONG) == b""


def test_why_there_is_no_connection_is_said(monkeypatch: pytest.MonkeyPatch):
    with listening() as (_, listener):
        port = free_port()
        with pytest.raises(UnavailableError, match=f"its port for lookups, 127.0.0.1:{port}, .*refused"):
            Asker(listener, port=port).open()
        monkeypatch.setattr(module, "_CONNECT_S", 0.1)
        with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(UnavailableError, match=r"within 0.1 s"):
            Asker(listener, port=silent.getsockname()[1]).open()


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    need_openssl()
    certified(tmp_path, "DNS:shards.example")
    security = Security(tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem")

    def believing(authority: str) -> Any:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        load_pem(context, None, None, tmp_path / authority)
        return context

    with listening(TOKEN, security.tls_context()) as (_, listener):
        asker = Asker(listener, TOKEN).open(believing("ca.pem"), "shards.example")
        assert asker.ask(b"x") == (b"xx", "OK", "")
        assert len(asker.ask(b"much")[0] or b"") == MUCH
        for authority, name in (("ca.pem", "127.0.0.1"), ("other.pem", "shards.example")):
            with pytest.raises(UnavailableError, match="certificate"):
                Asker(listener, TOKEN).open(believing(authority), name)
        assert asker.ask(b"x") == (b"xx", "OK", "")
        monkeypatch.setattr(module, "_CONNECT_S", 0.1)
        with pytest.raises(UnavailableError):
            Asker(listener, TOKEN).open()


# -- the server's end, by hand ----------------------------------------------------------------------------------------


@contextmanager
def talking(listener: ShardListener, token: str | None = "") -> Iterator[socket.socket]:
    """A connection by hand that has read the greeting and, unless ``token`` is None, proved it."""
    with socket.create_connection(("127.0.0.1", listener.port), LONG) as sock:
        greeting = exactly(sock, HEAD_BYTES + len(module._HELLO) + 64)
        if token is not None:
            sock.sendall(frame(0, module._HELLO + module._proof(token, greeting[-64:])))
        yield sock


def exactly(sock: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = sock.recv(count - len(found))
        assert more, "the server closed it"
        found += more
    return found


def rest(sock: socket.socket, *data: bytes) -> bytes:
    """What comes until the end after ``data``."""
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


def test_any_pieces():
    """Cut at any byte, several messages in a piece, and the beginning of a head alone."""
    draw = random.Random(0)
    messages = [draw.randbytes(draw.choice([0, 1, 2, 30, MOST])) for _ in range(200)]
    data = b"".join(frame(number + 7, message) for number, message in enumerate(messages))
    expected = b"".join(frame(number + 7, message * 2) for number, message in enumerate(messages))
    with listening() as (_, listener), talking(listener) as sock:
        at = 0
        while at < len(data):
            step = draw.choice([1, 2, 3, 5, 13, 400, 9000])
            sock.sendall(data[at : at + step])
            at += step
            if step < 5 and draw.random() < 0.2:
                time.sleep(0.001)  # it is read by itself
        assert exactly(sock, len(expected)) == expected


def test_a_proof_is_of_one_connection():
    with listening(TOKEN) as (answers, listener):
        with talking(listener, TOKEN) as sock:
            sock.sendall(frame(5, b"x"))
            assert exactly(sock, HEAD_BYTES + 2) == frame(5, b"xx")
        for proof in (module._proof(TOKEN, listener.server_id + bytes(32)), bytes(32), b"", TOKEN.encode()):
            for message in (module._HELLO + proof, proof):
                with talking(listener, None) as sock:
                    assert rest(sock, frame(0, message), frame(1, b"no")) == b""
        assert answers.asked.get() == b"x" and answers.asked.empty()


def test_junk_and_oversized_frames_end_only_their_connection():
    draw = random.Random(0)
    with listening() as (_, listener):
        asker = Asker(listener).open()
        for number in range(200):
            with talking(listener, None if number % 2 else "") as sock:
                rest(sock, draw.randbytes(draw.choice([1, 4, 60, 3000])))
        with talking(listener) as sock:
            assert rest(sock, frame(1, bytes(MOST + 1))) == b""
        assert asker.ask(b"x") == (b"xx", "OK", "")
        until(lambda: not listener.unproved and len(listener.thread.connections) == 1)


def test_peer_that_does_not_read_is_not_read_and_finally_closed():
    with listening() as (answers, listener), talking(listener) as sock:
        sock.sendall(frame(1, b"much"))
        until(lambda: not answers.asked.empty())
        for _ in range(50):
            sock.sendall(frame(2, b"much"))
        asker = Asker(listener).open()
        for _ in range(10):  # any other request that had been read would have been recorded by now
            assert asker.ask(b"x") == (b"xx", "OK", "")
        asked = [answers.asked.get() for _ in range(answers.asked.qsize())]
        assert asked.count(b"much") <= 2
        (slow,) = (each for each in listener.thread.connections if each._transport.get_write_buffer_size() > 0)
        until(lambda: slow not in listener.thread.connections)  # the system ends it, by TCP_USER_TIMEOUT
        assert "Connection timed out" in slow.why
        assert asker.ask(b"x") == (b"xx", "OK", "")


def test_peer_without_proof_of_its_token_gets_no_memory():
    with listening() as (_, listener):
        listener.max_request_bytes = 1 << 30
        with talking(listener, None) as sock:
            (connection,) = listener.unproved
            assert rest(sock, frame(0, bytes(module._PROOF_BYTES + 1))[:HEAD_BYTES]) == b""
            assert connection._message is None and not listener.unproved


def test_connections_that_say_nothing_make_room_for_others():
    with listening() as (_, listener):
        idle = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(module._UNPROVED + 20)]
        assert Asker(listener).open().ask(b"x") == (b"xx", "OK", "")
        until(lambda: len(listener.unproved) <= module._UNPROVED)
        for sock in idle:
            sock.close()
        until(lambda: not listener.unproved)


def test_a_port_that_is_taken_is_named():
    with (
        listening() as (answers, listener),
        pytest.raises(UnavailableError, match=f"127.0.0.1:{listener.port}"),
    ):
        ShardListener("127.0.0.1", listener.port, answers.answer, lambda _: b"", max_request_bytes=MOST)


# -- the thread -------------------------------------------------------------------------------------------------------


def test_actions_of_other_threads_run_in_order_and_one_failure_loses_no_other(
    caplog: pytest.LogCaptureFixture,
):
    thread = ShardsThread()
    seen: dict[int, list[int]] = {number: [] for number in range(4)}

    def hand_over(number: int) -> None:
        for each in range(500):
            thread.call(seen[number].append, each)
            if each % 100 == 0:
                thread.call(lambda: 1 / 0)

    callers = [threading.Thread(target=hand_over, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    done = threading.Event()
    thread.call(done.set)
    assert done.wait(LONG) and all(found == list(range(500)) for found in seen.values())
    assert caplog.text.count("ZeroDivisionError: division by zero") == 20
    thread.close()
    thread.call(print)  # nobody is there
    assert not thread._thread.is_alive()
    thread.close()


@pytest.mark.parametrize("token", [None, TOKEN])
def test_rankers_find_it(tmp_path: Path, token: str | None):
    archive, port, fixed = make_archive(tmp_path, "row_wise"), free_port(), free_port()
    security = Security(token=token)
    (tmp_path / "token").write_text(TOKEN)
    settings: dict[str, Any] = {} if token is None else {"token_file": str(tmp_path / "token")}
    path = write_shards(tmp_path / "shards.json", {rank: [f"127.0.0.1:{port}"] for rank in (0, 1, 2)}, **settings)
    with (
        shard(archive, (0, 1, 2), port=port, security=security, socket_port=fixed) as server,
        asking(path) as fan_out,
    ):
        (replica,) = fan_out.pool.everyone()
        first = replica._connection
        assert server.socket_port == fixed == first.address.port
        server.stop()
        until(lambda: not first.is_open and not replica.up)
        with shard(archive, (0, 1, 2), port=port, security=security):
            until(lambda: replica.up)
            assert replica._connection is not first, "it has another port and another name"


def test_a_server_whose_port_for_lookups_cannot_be_reached_is_not_up_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with shard(make_archive(tmp_path, "row_wise"), (0, 1, 2)) as server:
        port, reached = free_port(), server._listener.port
        server._listener.port = port  # as behind a firewall
        path = write_shards(tmp_path / "shards.json", {rank: [server.target] for rank in (0, 1, 2)})
        with asking(path, ready=False) as fan_out:
            (replica,) = fan_out.pool.everyone()
            until(lambda: f"its port for lookups, 127.0.0.1:{port}, cannot be reached" in fan_out.pool.addresses(0))
            assert not replica.up
            server._listener.port = reached
            until(lambda: replica.up)


# -- connections that are lost, silent or slow ----------------------------------------------------------------------------


def test_a_lost_connection_ends_every_request_though_their_ends_cancel_each_other_and_fail():
    """The end of a hedged request forgets others of the same connection."""
    with listening() as (answers, listener):
        asker = Asker(listener).open()
        ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        forgets: dict[int, Callable[[], object]] = {}

        def ask() -> None:
            for number in range(40):

                def done(*end: Any, number: int = number) -> None:
                    ended.put(number)
                    forgets[number - number % 2 + (1 - number % 2)]()  # its pair
                    if number % 5 == 0:
                        raise RuntimeError("a bug of the caller")

                forgets[number] = asker.connection.call(b"later", time.monotonic() + LONG, done)

        rankers_thread().call(ask)
        for _ in range(40):
            answers.asked.get(timeout=LONG)
        rankers_thread().call(asker.connection.end, "the host is gone")
        pairs = {ended.get(timeout=LONG) // 2 for _ in range(20)}
        assert pairs == set(range(20)) and ended.empty()
        assert not asker.connection._pending


class Proxy:
    """Passes bytes between a ranker and a listener; :meth:`fall_silent` moves nothing more on what is open, and closes nothing."""

    def __init__(self, port: int) -> None:
        self._port, self._moves, self._sockets = port, threading.Event(), [socket.create_server(("127.0.0.1", 0))]
        self._moves.set()
        self.port = self._sockets[0].getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._sockets[0].accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            self._sockets += [near, far]
            for here, there in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(here, there), daemon=True).start()

    def _pump(self, here: socket.socket, there: socket.socket) -> None:
        try:
            while data := here.recv(1 << 16):
                if not self._moves.is_set():
                    return
                there.sendall(data)
        except OSError:
            pass

    def fall_silent(self) -> None:
        self._moves.clear()

    def close(self) -> None:
        for each in self._sockets:
            each.close()


class Looks:
    """The looks of a connection for signs of life, which the test makes by hand, however much time passes between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._next: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._look = ShardConnection._look_if_alive
        monkeypatch.setattr(module, "_LOOK_S", 0.0)
        monkeypatch.setattr(ShardConnection, "_look_if_alive", lambda *state: self._next.put(state))

    def look(self) -> None:
        """Look once."""
        of_thread(self._look, *self._next.get(timeout=LONG))


def of_thread(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function`` returns on the rankers' thread."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    rankers_thread().call(lambda: found.put(function(*args)))
    return found.get(timeout=LONG)


def test_a_silent_connection_is_found_by_pings(monkeypatch: pytest.MonkeyPatch):
    looks = Looks(monkeypatch)
    with listening() as (answers, listener):
        proxy = Proxy(listener.port)
        asker = Asker(listener, port=proxy.port).open()
        assert asker.ask(b"x") == (b"xx", "OK", "")
        looks.look()
        for _ in range(2 * module._SILENT_LOOKS):  # answers to pings alone keep it
            before = asker.connection.received
            looks.look()  # nothing has come: a ping
            until(lambda before=before: asker.connection.received == before + HEAD_BYTES)
            looks.look()
        assert asker.ask(b"x") == (b"xx", "OK", "")
        assert [answers.asked.get(timeout=LONG) for _ in range(2)] == [b"x"] * 2
        assert answers.asked.empty()  # pings are no requests
        looks.look()
        waits, _ = asker.begin(b"later")
        assert answers.asked.get(timeout=LONG) == b"later"
        proxy.fall_silent()
        for _ in range(module._SILENT_LOOKS):
            looks.look()
        assert waits.empty() and asker.lost.empty()
        looks.look()
        assert waits.get(timeout=LONG)[:2] == (None, "UNAVAILABLE")
        assert "not even answers to pings" in asker.lost.get(timeout=LONG)
        proxy.close()


def test_a_large_request_that_is_sent_slowly_is_no_silence(monkeypatch: pytest.MonkeyPatch):
    """Its own pings wait behind it, so nothing comes back: the bytes that the other end takes are the sign of life."""
    looks, size = Looks(monkeypatch), 4 << 20
    may_take, freely = threading.Semaphore(0), threading.Event()
    monkeypatch.setattr(
        module, "keep_alive", lambda sock: None
    )  # with which the kernel gives up a closed window after 3 s
    with socket.create_server(("127.0.0.1", 0)) as slow, listening() as (_, listener):

        def serve() -> None:
            there, _ = slow.accept()
            with there:
                there.sendall(frame(0, module._HELLO + listener.server_id + bytes(32)))
                left = len(frame(0, module._HELLO + bytes(32))) + HEAD_BYTES + size
                while left > 0 and (freely.is_set() or may_take.acquire(timeout=LONG)):
                    data = there.recv(1 << 17)
                    left = left - len(data) if data else 0
                there.sendall(frame(1, b"taken"))
                there.recv(1 << 10)

        threading.Thread(target=serve, daemon=True).start()
        asker = Asker(listener, port=slow.getsockname()[1], max_request_bytes=size).open()
        connection = asker.connection
        ends, _ = asker.begin(bytes(size))
        looks.look()  # the greeting has come since
        for _ in range(2 * module._SILENT_LOOKS):

            def is_taken(before: int = of_thread(connection.unsent)[0]) -> bool:
                may_take.release()
                return int(of_thread(connection.unsent)[0]) > before

            until(is_taken)
            looks.look()
            assert of_thread(connection.unsent)[1] > module._PINGS_BYTES, "more than what the looks have sent waits"
        freely.set()
        may_take.release()
        assert ends.get(timeout=LONG) == (b"taken", "OK", "")
        asker.close()


def test_a_message_counts_in_the_budget_from_its_first_byte():
    budget = MemoryBudget(10 * MOST)
    with listening(budget=budget) as (_, listener):
        with talking(listener) as slow, talking(listener) as other:
            slow.sendall(frame(1, bytes(MOST))[:-1])
            until(lambda: budget.held == MOST)
            assert slow.send(b"\0") == 1
            assert exactly(slow, HEAD_BYTES + 2 * MOST) == frame(1, bytes(2 * MOST))
            until(lambda: budget.held == 0)
            full = budget.admit(10 * MOST - 10)
            other.sendall(frame(2, bytes(100))[:50])
            until(lambda: budget.refused == 1)
            other.sendall(frame(2, bytes(100))[50:] + frame(3, b"x"))
            assert exactly(other, HEAD_BYTES + len(REFUSED)) == frame(2, REFUSED)
            assert exactly(other, HEAD_BYTES + 2) == frame(3, b"xx")
            full.release()
            slow.sendall(frame(4, bytes(MOST))[:-1])
            until(lambda: budget.held == MOST)
        until(lambda: budget.held == 0)  # the connections have ended


def test_a_message_without_progress_ends_its_connection(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(frames, "_PROGRESS_S", 0.05)
    monkeypatch.setattr(frames, "_GRACE_S", 0.05)
    with listening() as (_, listener), talking(listener) as slow, talking(listener) as idle:
        slow.sendall(frame(1, bytes(MOST))[:-1])
        with suppress(ConnectionError):
            assert slow.recv(1) == b""
        idle.sendall(frame(1, b"x"))  # a connection without a message under way stays
        assert exactly(idle, HEAD_BYTES + 2) == frame(1, b"xx")
