"""The prefill engine's side: it computes prompts for decode engines, and leases them the pages.

A `DecodePeer` is one decode engine as the prefill engine sees it; the `PrefillSide` serves all of
them.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from twostroke.core.errors import BackendError, TwostrokeError
from twostroke.core.frozen import Frozen
from twostroke.core.request import FinishReason, Hints, Request
from twostroke.core.sampling import SamplingParams
from twostroke.engine.disaggregation import messages
from twostroke.engine.disaggregation.connection import PeerListener, PeerLostError
from twostroke.engine.disaggregation.messages import SENT, WRITTEN
from twostroke.engine.disaggregation.nixl import PROBE_BYTES, NixlProcess, NixlProcessError
from twostroke.engine.disaggregation.transfer_methods import MOVE_S
from twostroke.engine.disaggregation_stats import PrefillSideStats
from twostroke.engine.kv_cache import PrefixChain
from twostroke.engine.output import Mailbox, Output
from twostroke.engine.request_listener import RequestListener
from twostroke.model.program import BatchShape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.core.step import RequestDelta
    from twostroke.engine.client import Client
    from twostroke.engine.disaggregation.connection import PeerConnection
    from twostroke.engine.kv_cache.prefix import PageKey
    from twostroke.engine.scheduler.transfers import Lease

LEASE_S = 10.0  # that a decode engine may take to fetch what it was offered
_LOAD_S: Final = 0.5  # between reports of the load
_TICK_S: Final = 0.1
_NOTHING: Final = SamplingParams(max_tokens=1, temperature=0.0)  # which is discarded
_RECENT_S: Final = 10  # over which the pace is measured
_serial = itertools.count(1)


@dataclass(slots=True, eq=False)
class _LeasedPages:
    """A lease, and the pages of its offer in order."""

    reading: _PeerPrompt
    lease: Lease
    pages: list[int]
    until_s: float
    num_sending: int = 0  # answers that still read it
    is_over: bool = False  # no answer will follow these


class _PeerPrompt(RequestListener):
    """A prompt that is read for another engine; `chain` has the keys of its places."""

    def __init__(self, guest: DecodePeer, id_: int, request: Request, chain: list[bytes]) -> None:
        super().__init__(request, 0, Mailbox(self._end))
        self.id, self.chain = id_, chain
        self.unoffered: deque[tuple[int, PageKey]] = deque()  # with their places, in their order
        self.num_leases, self.has_ended = 0, False
        self.fault: str | None = None
        self._guest = guest

    def take(self, delta: RequestDelta, now_s: float) -> Output | None:
        """Offer what a step has computed."""
        del delta  # has no token
        reason = self.request.finish_reason
        self._guest.offer(self)
        if reason is None:
            return None
        self.first_token_s = self.last_token_s = now_s
        self.counter.begin(self.request, now_s)
        return self._ended(Output(self.index, "", ()), reason)

    def _end(self, output: Output) -> None:
        if output.finish_reason is not FinishReason.LENGTH:
            self.fault = str(output.error or "The prompt was not read to its end.")
        self.has_ended = True
        self._guest.finish_if_done(self)


class DecodePeer:
    """One decode engine. The loop's lock guards its state.

    Leases end in any order. Each refers to its pages, so none is handed out that a peer may read:
    an answer that is being sent delays the end, and `Content` tells a peer that copies the pages
    itself whether its lease held until then. Pages are evicted by when their leases ended, but are
    of no use without those before them: the end of a prompt's last lease brings them into order.
    """

    def __init__(self, lender: PrefillSide, connection: PeerConnection) -> None:
        self.readings: dict[int, _PeerPrompt] = {}
        self._lender, self._connection, self._pages = lender, connection, lender.pages
        self._lent: dict[int, _LeasedPages] = {}
        self._offers = itertools.count(1)
        self._newest_id = self._newest_written = 0
        self._carrier: NixlProcess | None = None
        self._to_send: queue.SimpleQueue[_PageReply | None] = queue.SimpleQueue()
        self._is_open = True

    def serve(self) -> None:
        """Answer until the connection ends."""
        writer = threading.Thread(target=self._write, name="twostroke-lend", daemon=True)
        try:
            if self._welcome():
                writer.start()
                while True:
                    self._do(self._connection.receive())
        except PeerLostError:
            pass
        finally:
            self.cut()
            if writer.ident is not None:
                self._to_send.put(None)
                writer.join()
            self._part()
            self._drop_all()
            self._connection.close()

    def cut(self) -> None:
        """End the connection; `serve` returns."""
        self._is_open = False
        self._connection.cut()
        if (carrier := self._carrier) is not None:
            carrier.end()

    def offer(self, reading: _PeerPrompt, known: int | None = None) -> None:
        """Offer pages of the first `known` places, or of those that the request has computed."""
        with self._pages.lock:
            if not self._is_open or reading.id not in self.readings:
                return
            num_computed = reading.request.num_computed // self._lender.kind.page_size
            end = num_computed if known is None else known
            ready = list(itertools.takewhile(lambda one: one[0] < end, reading.unoffered))
            lease = self._pages.lease([key for _, key in ready])
            if not lease.pages:
                return
            found = [(place, key) for place, key in ready if key in lease.pages]
            offered = {key for _, key in found}
            kept = [one for one in reading.unoffered if one[1] not in offered]
            reading.unoffered = deque(kept)
            number = next(self._offers)
            pages = [lease.pages[key] for _, key in found]
            until_s = time.monotonic() + LEASE_S
            self._lent[number] = _LeasedPages(reading, lease, pages, until_s)
            reading.num_leases += 1
            self._lender.num_lent += len(pages)
            named = [(key[0], place, page) for (place, key), page in zip(found, pages, strict=True)]
            self._say(messages.Offer(reading.id, number, named))

    def finish_if_done(self, reading: _PeerPrompt) -> None:
        """Say that no more comes, once all that could be offered was."""
        with self._pages.lock:
            if not reading.has_ended or self.readings.get(reading.id) is not reading:
                return
            if not reading.num_leases and reading.unoffered:
                self.offer(reading)  # there is room now, or these pages were evicted
            if not reading.num_leases:
                del self.readings[reading.id]
                self._say(messages.PrefillFinished(reading.id, reading.fault))

    def _welcome(self) -> bool:
        hello, own = self._connection.receive(), self._lender.kind
        reason = None
        if not isinstance(hello, messages.PeerHello) or hello.version != messages.VERSION:
            reason = "another version of Twostroke"
        else:
            reason = own.difference(hello.kind)
        if reason is not None:
            self._connection.send(messages.Refused(f"The prefill engine has {reason}."))
            return False
        num_pages = self._lender.loop.facts.num_pages
        self._connection.send(messages.Welcome(messages.VERSION, own, num_pages))
        return True

    def _do(self, question: messages.Question) -> None:
        match question:
            case messages.PrefillPrompt():
                self._read(question)
            case messages.Fetch():
                if question.how == SENT:
                    self._part()  # a carrier was measured to be slower
                self._fetch(question)
            case messages.Abort():
                self._abort(question.id)
            case messages.NixlJoin():
                self._join(question)
            case messages.NixlProbe():
                self._probe(question)
            case messages.PeerHello():
                pass  # a second time

    def _read(self, question: messages.PrefillPrompt) -> None:
        if question.id <= self._newest_id:
            return  # a second time
        self._newest_id = question.id
        lender, tokens = self._lender, question.tokens
        chain = PrefixChain(lender.kind.page_size, question.salt)
        request = Request(
            id=f"lent{next(_serial)}",
            tokens=tokens,
            num_prompt=len(tokens),
            params=_NOTHING,
            seed=0,
            priority=question.priority,
            salt=question.salt,
            tenant=question.salt.decode(errors="replace"),
            hints=Hints(shows_progress=True),
        )
        num_places = len(tokens) // lender.kind.page_size
        try:
            self._check(question)
            chain.extend(tokens, num_places)
            reading = _PeerPrompt(self, question.id, request, chain.keys)
            reading.unoffered += [
                (place, (group, chain.keys[place]))
                for place in range(num_places)
                for group, first in enumerate(question.firsts)
                if place >= first
            ]
            with self._pages.lock:
                self.readings[question.id] = reading
                lender.num_prompts += 1
                self.offer(reading, num_places)
                reading.has_ended = not reading.unoffered  # all had been computed
                self.finish_if_done(reading)
                if reading.unoffered:
                    lender.loop.submit([reading])
        except TwostrokeError as error:
            with self._pages.lock:
                self.readings.pop(question.id, None)
            self._say(messages.PrefillFinished(question.id, str(error)))

    def _check(self, question: messages.PrefillPrompt) -> None:
        """Refuse what no decode engine of the same kind asks for."""
        tokens, vocab_size = question.tokens, self._lender.client.card.cost.program.vocab_size
        is_whole = tokens and not len(tokens) % self._lender.kind.page_size
        if not is_whole or min(tokens) < 0 or max(tokens) >= vocab_size:
            raise PeerLostError("A prompt cannot be read.")
        if len(question.firsts) != len(self._lender.kind.windows):
            raise PeerLostError("A prompt has another number of cache groups.")

    def _fetch(self, question: messages.Fetch) -> None:
        with self._pages.lock:
            lent = self._lent.get(question.offer)
            is_known = question.how == WRITTEN and question.number <= self._newest_written
            if lent is None or lent.is_over or is_known:  # written once, however often asked for
                self._say(messages.Content(question.number, is_valid=False))
                return
            lent.is_over = question.is_last
            pages = [lent.pages[at] for at in question.wanted if 0 <= at < len(lent.pages)]
            answer = messages.Content(question.number, is_valid=True)
            views: Iterable[memoryview[Any]] = ()
            if question.how == SENT:
                memory = self._pages.memory
                assert memory is not None
                views = map(memory.read, pages)
                answer = replace(answer, num_bytes=len(pages) * memory.page_bytes)
            lent.num_sending += 1
            if question.how == WRITTEN:
                self._newest_written = question.number
            move = (pages, question.targets) if question.how == WRITTEN else None
            self._to_send.put(_PageReply(answer, views, question.offer, move))

    def _join(self, question: messages.NixlJoin) -> None:
        """Open a carrier, and let it meet that of the decode engine."""
        if self._carrier is not None:
            return  # a second time
        try:
            carrier = self._lender.open_carrier()
            carrier.meet(question.place, MOVE_S)
        except NixlProcessError as error:
            self._say(messages.NixlJoined(None, str(error)))
            return
        self._carrier = carrier
        self._say(messages.NixlJoined(carrier.place))

    def _part(self) -> None:
        """Let nothing outside read the pages any more."""
        if self._carrier is not None:
            self._carrier.close()
            self._carrier = None

    def _probe(self, question: messages.NixlProbe) -> None:
        content = messages.Content(question.number, is_valid=True)
        if question.how == SENT:
            content = replace(content, num_bytes=PROBE_BYTES)
            self._to_send.put(_PageReply(content, [memoryview(bytes(PROBE_BYTES))]))
        else:
            self._to_send.put(_PageReply(content, move=([], [])))

    def _abort(self, id_: int) -> None:
        with self._pages.lock:
            reading = self.readings.pop(id_, None)
            if reading is None:
                return
            for number in [n for n, lent in self._lent.items() if lent.reading is reading]:
                self._lent[number].is_over = True
                self._release_if_over(number)
        self._lender.loop.cancel([reading.request.id])

    def _release_if_over(self, number: int) -> None:
        lent = self._lent[number]
        if lent.is_over and not lent.num_sending:
            del self._lent[number]
            self._pages.release(lent.lease)
            lent.reading.num_leases -= 1
            if not lent.reading.num_leases:
                self._pages.touch(lent.reading.chain)
            self.offer(lent.reading)
            self.finish_if_done(lent.reading)

    def _say(self, message: messages.Answer) -> None:
        self._to_send.put(_PageReply(message))

    def _write(self) -> None:
        """Send answers and reports, and end leases that are late, until the connection ends."""
        load_s = 0.0
        try:
            while True:
                answer = None
                with suppress(queue.Empty):
                    answer = self._to_send.get(timeout=_TICK_S)
                    if answer is None:
                        return
                if answer is not None:
                    message = self._move(answer) if answer.move else answer.message
                    self._connection.send(message, answer.pages)
                    if answer.offer:
                        self._sent(answer.offer)
                now_s = time.monotonic()
                if now_s - load_s >= _LOAD_S:
                    load_s = now_s
                    self._connection.send(
                        messages.PrefillLoad(*self._lender.load(), self._newest_id)
                    )
                    self._end_late(now_s)
        except (PeerLostError, BackendError):
            self.cut()

    def _move(self, answer: _PageReply) -> messages.Answer:
        """Write pages to the decode engine, and return what it hears then."""
        assert answer.move is not None
        (own, theirs), lent = answer.move, self._lent.get(answer.offer)
        if lent is not None and self.readings.get(lent.reading.id) is not lent.reading:
            return replace(answer.message, is_valid=False)  # it was aborted
        if self._carrier is None or len(own) != len(theirs):
            raise PeerLostError("Pages cannot be written.")
        try:
            if own or lent is None:  # a probe has none
                self._carrier.move(own, theirs, MOVE_S, is_write=True)
        except NixlProcessError:
            if lent is not None:
                raise
            return replace(answer.message, is_valid=False)
        return answer.message

    def _sent(self, number: int) -> None:
        with self._pages.lock:
            self._lent[number].num_sending -= 1
            self._release_if_over(number)

    def _end_late(self, now_s: float) -> None:
        with self._pages.lock:
            for number in [n for n, lent in self._lent.items() if lent.until_s < now_s]:
                self._lender.num_late += not self._lent[number].is_over
                self._lent[number].is_over = True
                self._release_if_over(number)

    def _drop_all(self) -> None:
        """Give back all that the engine had."""
        with self._pages.lock:
            readings, self.readings = list(self.readings.values()), {}
            for number, lent in list(self._lent.items()):
                lent.is_over, lent.num_sending = True, 0
                self._release_if_over(number)
        self._lender.loop.cancel([reading.request.id for reading in readings])


class _PageReply(Frozen):
    """A message to send, with pages; `offer` is the one that they are of.

    `move` are pages to write before, and those of the decode engine to which; none for a probe.
    """

    message: messages.Answer
    pages: Iterable[memoryview[Any]] = ()
    offer: int = 0
    move: tuple[list[int], list[int]] | None = None


class PrefillSide:
    """Serves all decode engines that connect."""

    def __init__(
        self,
        client: Client,
        kind: messages.KvCacheSpecMessage,
        address: tuple[str, int],
        secret: bytes,
        memory: int | None,
        link: str = "auto",
    ) -> None:
        """Listen at `address`; `memory` is the open file of the pages, if they are shared.

        `link` is a word of `PEER_LINKS`.
        """
        self.client, self.kind = client, kind
        self.loop, self.pages = client.loop, client.loop.pages
        self.num_prompts = self.num_lent = self.num_late = 0
        self._memory, self._link = memory, link
        self._cost = client.card.cost.per_step()
        self._guests: set[DecodePeer] = set()
        self._listener = PeerListener(address, secret, memory, self._serve)
        self.pages.on_close.append(self.close)

    def close(self) -> bool:
        """End all connections and leases."""
        self._listener.close()
        for guest in list(self._guests):
            guest.cut()
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None
        return True

    def view(self) -> PrefillSideStats:
        """Return what it does now."""
        with self.pages.lock:
            reading = sum(len(guest.readings) for guest in self._guests)
            return PrefillSideStats(
                self._listener.port,
                len(self._guests),
                reading,
                self.num_prompts,
                self.num_lent,
                self.num_late,
            )

    def flops(self, first: int, end: int) -> float:
        """Return the work of reading a prompt's tokens from `first` to `end`."""
        return self._cost.of(BatchShape.prefill(end - first, first)).flops if end > first else 0.0

    def load(self) -> tuple[float, float]:
        """Return the work that waits or is being done, and the pace of prefill."""
        span = self.loop.span(_RECENT_S)
        recent = (span.last.strokes - span.first.strokes).prefill
        pace = recent.flops_per_s or self.loop.snapshot().strokes.prefill.flops_per_s
        with self.pages.lock:
            readings = [one for guest in self._guests for one in guest.readings.values()]
            open_ = [one.request for one in readings if not one.has_ended]
            counts = [(one.num_computed, one.num_prompt) for one in open_]
        return sum(self.flops(*count) for count in counts), pace

    def open_carrier(self) -> NixlProcess:
        """Return a new carrier of the pages.

        Raises:
            CarrierError: NIXL is not to be used, or does not work here.
        """
        if self._link == "socket":
            raise NixlProcessError("its --peer-link is socket.")
        if self._memory is None:
            raise NixlProcessError("its pages cannot be shared.")
        return NixlProcess(self._memory, self.loop.facts.num_pages, self.kind.page_bytes)

    def _serve(self, connection: PeerConnection) -> None:
        guest = DecodePeer(self, connection)
        with self.pages.lock:
            self._guests.add(guest)
        try:
            guest.serve()
        finally:
            with self.pages.lock:
                self._guests.discard(guest)
