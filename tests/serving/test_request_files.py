"""The files that architecture.md names for a small Predict are those that a request runs through in a server."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import recinfer
from recinfer.inference.predictor import Predictor
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.server.server import Server
from tests.serving.conftest import make_request
from tests.waiting import until

PACKAGE = Path(recinfer.__file__).parent
PAGE = PACKAGE.parent / "docs" / "explanation" / "architecture.md"


class Trace:
    """Profiles the threads that start while it is open; counts calls of files and of compiled functions while ``on``."""

    def __init__(self) -> None:
        self.on = False
        self.files: set[str] = set()

    def __enter__(self) -> Trace:
        threading.setprofile(self._event)
        return self

    def __exit__(self, *unused: object) -> None:
        threading.setprofile(None)  # type: ignore[arg-type]  # None ends it

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self.on or threading.current_thread().name == "recinfer-serving":  # which has periodic work
            return
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            self.files.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))
        elif event == "c_call" and str(getattr(arg, "__module__", "")).startswith("recinfer."):
            self.files.add(arg.__module__.removeprefix("recinfer.").replace(".", "/") + ".c")


def named_files() -> set[str]:
    text = PAGE.read_text(encoding="utf-8")
    part = text[text.index("- **Small local Predict**") : text.index("`tests/serving/test_request_files.py` traces")]
    names = re.findall(r"`([\w/]+\.(?:py|c))`", part)
    return {n.removeprefix("recinfer/") if n.startswith("recinfer/") else f"serving/{n}" for n in names}


def test_a_small_predict_runs_through_the_files_of_the_page(predictor: Predictor) -> None:
    dense, features = make_request(seed=1, batch=2)
    with Trace() as trace, Server({"tiny": predictor}) as server, InferenceClient(server.target, timeout=60) as client:
        for _ in range(3):  # the server learns the order of the keys, and the cost of a run
            client.predict(dense, features)
        until(lambda: sum(server.stats.requests().values()) == 3)
        trace.on = True
        client.predict(dense, features)
        until(lambda: sum(server.stats.requests().values()) == 4)
        trace.on = False
    assert trace.files == named_files()
