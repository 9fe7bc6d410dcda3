"""What both kinds of way to a server promise: one question at a time, and who asked is always told, once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from recinfer.serving.server.serial_connection import Way
from tests.serving import test_core_stream as streams
from tests.serving.asked import LONG, Answers, ask, into
from tests.serving.remote import test_sockets as sockets
from tests.serving.remote.fleet import until

Opens = Callable[[], Way]


@pytest.fixture(params=["stream", "socket"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Answers, Opens]]:
    if request.param == "stream":
        with streams.served() as (answers, _, channel):
            yield answers, lambda: streams.opened(channel)
    else:
        with sockets.served() as (answers, server):
            yield answers, lambda: sockets.opened(server)


def test_one_question_after_another(served: tuple[Answers, Opens]):
    way = served[1]()
    assert way.is_open
    for question in (b"x", b"", b"y" * sockets.MOST):
        assert ask(way, question) == (question * 2, "OK", "")
    assert way.close()
    until(lambda: way.is_over)
    assert not way.ask(b"x", time.monotonic() + LONG, into()[1])


def test_what_waits_takes_no_second_question(served: tuple[Answers, Opens]):
    answers, opens = served
    way = opens()
    ends, reply = into()
    assert way.ask(b"wait", time.monotonic() + LONG, reply)
    assert answers.asked.get(timeout=LONG) == b"wait"
    assert not way.ask(b"x", time.monotonic() + LONG, into()[1])
    assert not way.close()
    answers.go_on.set()
    assert ends.get(timeout=LONG) == (b"waitwait", "OK", "")
    assert ask(way, b"x") == (b"xx", "OK", "")


@pytest.mark.parametrize("how", ["forget", "expire"])
def test_an_answer_that_nobody_waits_for_is_nobody_elses(served: tuple[Answers, Opens], how: str):
    answers, opens = served
    way = opens()
    ends, reply = into()
    now = time.monotonic()
    assert way.ask(b"wait", now + LONG, reply)
    way.expire(now)
    if how == "forget":
        way.forget(reply)
        way.expire(now + LONG)
    else:
        way.expire(now + LONG)
        assert ends.get(timeout=LONG)[:2] == (None, "DEADLINE_EXCEEDED")
    assert not way.ask(b"x", now + LONG, into()[1]), "its answer is still to come"
    answers.go_on.set()
    until(lambda: not way._asked)
    assert ask(way, b"x") == (b"xx", "OK", "")
    assert ends.empty()


def test_a_failure_ends_it_and_tells_who_asked_no_secret(served: tuple[Answers, Opens]):
    way = served[1]()
    message, code, details = ask(way, b"fail")
    assert message is None and code in ("UNKNOWN", "UNAVAILABLE") and "secret" not in details
    until(lambda: way.is_over)
    assert ask(served[1](), b"x") == (b"xx", "OK", "")


@pytest.mark.parametrize("at_once", [False, True])
def test_who_asks_while_it_ends_is_told_or_refused(served: tuple[Answers, Opens], at_once: bool):
    """Never neither, and never both, whatever the moment."""
    for number in range(40):
        way = served[1]()
        ends, reply = into()
        closer = threading.Thread(target=way.close, kwargs={"at_once": at_once})
        closer.start()
        time.sleep(number * 9e-6)
        if way.ask(b"x", time.monotonic() + LONG, reply):
            found = ends.get(timeout=LONG)
            assert found[:2] == (b"xx", "OK") or (at_once and found[:2] == (None, "UNAVAILABLE"))
        closer.join()
        way.close()
        assert ends.empty()
