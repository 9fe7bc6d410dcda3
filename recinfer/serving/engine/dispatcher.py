"""Which way a request takes: answered at once on gRPC's thread, by shards on other hosts, or in a run that others share."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from recinfer.inference.lookups import run_later
from recinfer.serving.engine.byte_path import AWAY_BYTES, DIRECT_BYTES, PlainRequest
from recinfer.serving.engine.decoded_path import Call, InferenceService, Message
from recinfer.serving.engine.pace import MOST_AWAY, gains_nothing
from recinfer.serving.engine.parallel_parts import SideBySide
from recinfer.serving.engine.remote_byte_path import Aside
from recinfer.serving.engine.scheduler import BatchConfig, Batcher
from recinfer.serving.server.grpc_call import LATER, Later
from recinfer.serving.server.grpc_methods import Told, deadline

__all__ = ["Answering"]

# A request of up to this many bytes is answered on the event loop itself: handing it to a thread and back costs more
# than running it. A larger one goes to the pool, so that the loop stays free for the small ones and for health.
_INLINE_BYTES = 32 << 10


class Answering:
    """Answers lookups and predictions. Made on the event loop.

    Args:
        service: what they are.
        batching: how requests share runs.
        threads: for large requests.
        is_away: the rows are on other hosts.
        coming: how many calls gRPC's thread has given to the loop that are not there yet.
        busy_s: for how long that thread has had no rest; see recinfer.serving.engine.pace.BUSY_S.

    Attributes:
        calls: the names of the calls.
        batcher: what waits, and runs.
    """

    def __init__(
        self,
        service: InferenceService,
        batching: BatchConfig,
        threads: int,
        *,
        is_away: bool,
        coming: Callable[[], int],
        busy_s: Callable[[], float],
    ) -> None:
        self._service, self._batching, self._is_away, self._coming = service, batching, is_away, coming
        self._busy_s = busy_s
        self._decoders = {"Lookup": service.decode_lookup, "Predict": service.decode_predict}
        self.calls = tuple(self._decoders)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="recinfer-request")
        self._decode_pool = ThreadPoolExecutor(1, thread_name_prefix="recinfer-decode")
        self._side_by_side = SideBySide(threads)
        self.batcher = Batcher(
            functools.partial(service.run, max_batch=batching.max_batch),
            self._pool,
            threads,
            batching,
            waited=functools.partial(service.stats.stages.add, "queue"),
            run_later=self._run_later if is_away else None,
        )

    def close(self) -> None:
        """No request will come any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._decode_pool.shutdown(wait=False, cancel_futures=True)
        self._side_by_side.close()

    # -- on the loop

    async def ask(self, call: str, data: bytes, tried: bool = False) -> bytes:
        """The answer to a call. ``tried``: gRPC's thread could not give it at once."""
        decode = self._decoders.get(call)
        if decode is None:
            return self._service.get_model(data)
        if len(data) <= (AWAY_BYTES if self._is_away else DIRECT_BYTES) and not tried:
            answer = await self._away(call, data) if self._is_away else self.directly(call, data, deadline.get())
            if answer is not None:
                return answer
        if len(data) <= _INLINE_BYTES:
            self.batcher.room.admit(len(data))
            # Which model it is for is known once it is decoded; models do not wait for each other.
            one_model = len(self._service.registry.names()) == 1
            work: Call | Message = Message(call, data) if one_model else decode(data)
        elif (large := self._large(call, data)) is not None:
            self.batcher.room.admit(len(data))
            work = large
        else:
            with self.batcher.room.place(len(data)):
                work = await asyncio.get_running_loop().run_in_executor(self._decode_pool, decode, data)
        return await self.batcher.submit(work, deadline.get())

    def _large(self, call: str, data: bytes) -> Message | None:
        """A request that is long, but needs no decoding before it is run."""
        if self._is_away or len(self._service.registry.names()) > 1:
            return None
        samples = self._service.direct.samples(data)
        return None if samples is None or samples == 1 else Message(call, data, samples)

    async def _away(self, call: str, data: bytes) -> bytes | None:
        """As :meth:`away_at_once`, for who comes through another door."""
        until = deadline.get()
        self.batcher.check_deadline(until)
        if not self.batcher.may_go_away() or (asked := self._service.away.begin(call, data)) is None:
            return None
        aside = beside = None
        if len(data) > _INLINE_BYTES:
            aside = functools.partial(asyncio.get_running_loop().run_in_executor, self._pool)
            beside = self._side_by_side
        with self.batcher.away(call, asked.request.batch):
            return await self._service.away.answer(asked, until, aside, beside)

    async def _run_later(self, works: Sequence[Call | Message], until: float, *, long: bool) -> list[bytes | Exception]:
        """Run works whose rows are on other hosts; what computes long does so beside the loop."""
        beside = None
        if long:
            beside = functools.partial(asyncio.get_running_loop().run_in_executor, self._pool)
        return await run_later(self._service.run_steps(works, self._batching.max_batch), until, beside)

    # -- on the loop, or on gRPC's thread

    def directly(self, call: str, data: bytes, until: float) -> bytes | None:
        """The answer to a small request that is sooner done than queued; None for others.

        What the queue and a merged run cost a lookup is more than its rows. A dense run costs more, and less for each
        when it is shared: it goes alone only while requests come one by one.
        """
        batcher, direct = self.batcher, self._service.direct
        if len(data) > DIRECT_BYTES:
            return None
        start = batcher.check_deadline(until)
        if call == "Lookup":
            if (found := direct.lookup(data)) is None:
                return None
            batcher.count(found[1])
            return found[0]
        # Those that gRPC's thread has given to the loop and that are not there yet will wait for a run together.
        if self._coming() or not batcher.may_go_straight(call, len(data)):
            return None
        begun = time.thread_time()
        if (found := direct.predict(data)) is None:
            return None
        batcher.went_straight(call, time.monotonic() - start, time.thread_time() - begun)
        return found[0]

    def at_once(self, call: str, data: bytes, until: float, defer: Callable[[], Told]) -> bytes | Later | None:
        """The same; a larger prediction that comes while nothing else is there is run to its end at once, in parts side by side:
        here where that is short, else on a thread of its own.
        """
        found = self.directly(call, data, until)
        if found is not None or call != "Predict" or len(data) <= _INLINE_BYTES:
            return found
        if self._coming() or not self.batcher.may_go_away() or len(self._service.registry.names()) > 1:
            return None
        self.batcher.check_deadline(until)
        start = time.perf_counter()
        request = self._service.direct.read(data, large=True)
        if request is None or request.batch == 1 or not request.can_predict():
            return None
        decode_s = time.perf_counter() - start
        lane = Message(call, data, request.batch).lane
        is_short = self.batcher.is_known_short(lane, request.batch, request.parts(self._side_by_side.threads))
        back = self.batcher.goes_away(lane)
        if is_short:
            return self._alone(request, decode_s, back)
        tell = defer()

        def run() -> None:
            told: bytes | Exception | None
            try:
                told = self._alone(request, decode_s, back)
            except Exception as error:
                told = error
            tell(told)

        self._pool.submit(run)
        return LATER

    def _alone(self, request: PlainRequest, decode_s: float, back: Callable[[int, float], None]) -> bytes | None:
        """The answer to a large prediction that came alone; None: its handler has to answer.

        Args:
            back: told when it is over; see Batcher.goes_away.
        """
        begun = time.thread_time()
        answer, elsewhere = None, 0.0
        try:
            answer, elsewhere = self._service.direct.predict_alone(request, self._side_by_side, decode_s)
        finally:
            back(0 if answer is None else request.batch, time.thread_time() - begun + elsewhere)
        return answer

    def away_at_once(self, call: str, data: bytes, until: float, defer: Callable[[], Told]) -> Later | None:
        """The answer to a request whose rows are on other hosts, while few are under way; on gRPC's threads to its
        end, but for dense runs that are not known to be short. None for others.
        """
        batcher, away = self.batcher, self._service.away
        batcher.check_deadline(until)
        mixes = gains_nothing(len(data), call == "Predict")
        if len(data) > AWAY_BYTES or (self._coming() and not mixes):
            return None
        if not batcher.may_go_away(MOST_AWAY, self._busy_s(), mixes):
            return None
        asked = away.begin(call, data)
        if asked is None or not asked.parts:
            return None
        samples, lane = asked.request.batch, (call, asked.request.model.name)
        most = batcher.most_away(lane, samples, len(asked.parts), len(data))
        if not batcher.may_go_away(most, mixes=mixes):
            return None
        aside: Aside = _now
        beside = None
        if asked.predicts and len(data) > _INLINE_BYTES:
            beside = self._side_by_side
            if not batcher.is_known_short(lane, samples, asked.request.parts(beside.threads)):
                aside = self._pool.submit
        back, tell = batcher.goes_away(lane, alone=most == 1), defer()

        def told(found: bytes | Exception | None, cost: float) -> None:
            back(0 if found is None else samples, cost)
            tell(found)

        away.answer_later(asked, until, told, aside, beside)
        return LATER


def _now(work: Callable[[], None]) -> None:
    work()
