"""The prefill engine's side: prefills prompts of decode engines and leases them the KV pages.

The `PrefillSide` has a `DecodeEngineConnection` for each decode engine.
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
from twostroke.core.request import NO_STATE, FinishReason, Hints, Request
from twostroke.core.sampling import SamplingParams
from twostroke.core.transport.frames import ConnectionLostError
from twostroke.engine.disaggregation import messages
from twostroke.engine.disaggregation.connection import listen_for_decode_engines
from twostroke.engine.disaggregation.messages import SENT, WRITTEN
from twostroke.engine.disaggregation.nixl import PROBE_BYTES, NixlProcess, NixlProcessError
from twostroke.engine.disaggregation.transfer_methods import MOVE_TIMEOUT_S
from twostroke.engine.disaggregation_stats import PrefillSideStats
from twostroke.engine.kv_cache import PrefixChain
from twostroke.engine.output import Mailbox, Output
from twostroke.engine.request_listener import RequestListener
from twostroke.model.program import BatchShape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.core.step import RequestDelta
    from twostroke.core.transport.connection import Connection
    from twostroke.engine.client import Client
    from twostroke.engine.disaggregation.messages import DecodeMessage
    from twostroke.engine.kv_cache.prefix import PageKey
    from twostroke.engine.scheduler.transfers import Lease

LEASE_S = 10.0  # in which a decode engine must fetch the pages that it was offered
_LOAD_INTERVAL_S: Final = 0.5  # between reports of the load
_POLL_S: Final = 0.1
_SPEED_WINDOW_S: Final = 10  # over which the speed of prefill is measured
_PREFILL_ONLY: Final = SamplingParams(max_tokens=1, temperature=0.0)  # the token is dropped
_request_numbers = itertools.count(1)


class PrefillSide:
    """Prefills prompts for all decode engines that connect, and leases them the KV pages.

    Attributes:
        client, loop, pages: the engine's client, its loop, and access to its pages.
        spec: the format of KV pages, which decode engines must share.
        num_prompts: prompts prefilled for decode engines since the start.
        num_leased_pages: pages leased since the start.
        num_expired_leases: leases that ended because a decode engine took too long.
    """

    def __init__(
        self,
        client: Client,
        spec: messages.KvCacheSpecMessage,
        *,
        address: tuple[str, int],
        secret: bytes,
        page_file: int | None,
        link: str = "auto",
    ) -> None:
        """Listen at `address` for decode engines.

        `page_file` is the open file of the KV pages, if other processes can map them. `link` is one
        of `PEER_LINKS`: how decode engines may fetch pages.
        """
        self.client = client
        self.spec = spec
        self.loop = client.loop
        self.pages = client.loop.pages
        self.num_prompts = 0
        self.num_leased_pages = 0
        self.num_expired_leases = 0
        self._page_file = page_file
        self._link = link
        self._cost = client.card.cost.per_step()
        self._decode_engines: set[DecodeEngineConnection] = set()
        self._listener = listen_for_decode_engines(
            address, secret, page_file=page_file, serve=self._serve
        )
        self.pages.on_close.append(self.close)

    def close(self) -> bool:
        """End all connections to decode engines and all leases; always returns True."""
        self._listener.close()
        for engine in list(self._decode_engines):
            engine.cut()
        if self._page_file is not None:
            os.close(self._page_file)
            self._page_file = None
        return True

    def stats(self) -> PrefillSideStats:
        """Return the number of decode engines and their prompts now, and counts since the start."""
        with self.pages.lock:
            return PrefillSideStats(
                port=self._listener.port,
                num_peers=len(self._decode_engines),
                num_prefilling=sum(len(engine.prompts) for engine in self._decode_engines),
                num_prompts=self.num_prompts,
                num_leased_pages=self.num_leased_pages,
                num_expired_leases=self.num_expired_leases,
            )

    def load(self) -> tuple[float, float]:
        """Return the work of all unfinished prompts in FLOPs, and the speed of prefill.

        The speed is in FLOP/s. Queued prompts are included.
        """
        span = self.loop.span(_SPEED_WINDOW_S)
        recent = (span.last.phases - span.first.phases).prefill
        flops_per_s = recent.flops_per_s or self.loop.snapshot().phases.prefill.flops_per_s
        with self.pages.lock:
            requests = [
                prompt.request
                for engine in self._decode_engines
                for prompt in engine.prompts.values()
                if not prompt.has_ended
            ]
            spans = [(request.num_computed, request.num_prompt) for request in requests]
        return sum(self._prefill_flops(first, end) for first, end in spans), flops_per_s

    def open_nixl(self) -> NixlProcess:
        """Start a NIXL process that moves this engine's KV pages.

        Raises:
            NixlProcessError: NIXL is switched off, or does not work here.
        """
        if self._link == "socket":
            raise NixlProcessError("its --peer-link is socket.")
        if self._page_file is None:
            raise NixlProcessError("its pages cannot be shared.")
        return NixlProcess(self._page_file, self.loop.facts.num_pages, self.spec.page_bytes)

    def _prefill_flops(self, first: int, end: int) -> float:
        """Return the FLOPs of prefilling a prompt's tokens from index `first` to `end`."""
        return self._cost.of(BatchShape.prefill(end - first, first)).flops if end > first else 0.0

    def _serve(self, connection: Connection[DecodeMessage]) -> None:
        decode_engine = DecodeEngineConnection(self, connection)
        with self.pages.lock:
            self._decode_engines.add(decode_engine)
        try:
            decode_engine.serve()
        finally:
            with self.pages.lock:
                self._decode_engines.discard(decode_engine)


class DecodeEngineConnection:
    """A prefill engine's end of the connection to one decode engine. The loop's lock guards it.

    The decode engine's end is a `PrefillEngineConnection` (prefill_connection.py): each end has the
    name of the engine to which it leads.

    No page is reused while the decode engine may read it: each lease has references to its pages,
    and a lease does not end while a reply with its pages is sent. If the decode engine copies pages
    itself, `Content` tells it whether the lease lasted until the end of the copy.

    Leases may end in any order, and pages would be evicted in this order. But a page is useless
    without the pages before it. So when a prompt's last lease ends, the prompt's pages are marked
    as used, such that the prompt's first page is evicted last.

    Attributes:
        prompts: prompts of the decode engine that are not finished, by number.
    """

    def __init__(self, prefill_side: PrefillSide, connection: Connection[DecodeMessage]) -> None:
        self.prompts: dict[int, _LeasedPrompt] = {}
        self._prefill_side = prefill_side
        self._connection = connection
        self._pages = prefill_side.pages
        self._leased: dict[int, _LeasedPages] = {}  # by number of the offer
        self._offer_numbers = itertools.count(1)
        self._newest_id = 0
        self._newest_written = 0  # number of the newest fetch with the mode `WRITTEN`
        self._nixl_process: NixlProcess | None = None
        self._to_send: queue.SimpleQueue[_PageReply | None] = queue.SimpleQueue()
        self._is_open = True

    def serve(self) -> None:
        """Answer the decode engine's messages until the connection ends."""
        sender = threading.Thread(target=self._run_sender, name="twostroke-send-pages", daemon=True)
        try:
            if self._welcome():
                sender.start()
                while True:
                    self._handle(self._connection.receive())
        except ConnectionLostError:
            pass
        finally:
            self.cut()
            if sender.ident is not None:
                self._to_send.put(None)
                sender.join()
            self._close_nixl()
            self._release_all()
            self._connection.close()

    def cut(self) -> None:
        """End the connection to the decode engine, so that `serve` returns."""
        self._is_open = False
        self._connection.cut()
        if (nixl_process := self._nixl_process) is not None:
            nixl_process.end()

    def offer(self, prompt: _LeasedPrompt, num_pages: int | None = None) -> None:
        """Offer KV pages of a prompt to the decode engine, as soon as they are computed.

        These are the cached pages among the first `num_pages`; without `num_pages`, all pages that
        the request has computed. The snapshot after the prompt is offered as well.
        """
        with self._pages.lock:
            if not self._is_open or prompt.id not in self.prompts:
                return
            self._offer_state(prompt)
            if num_pages is None:
                num_pages = prompt.request.num_computed // self._prefill_side.spec.page_size
            ready = []
            for index, key in prompt.unoffered:
                if index >= num_pages:
                    break
                ready.append((index, key))
            lease = self._pages.lease([key for _, key in ready])
            if not lease.pages:
                return
            leased = [(index, key) for index, key in ready if key in lease.pages]
            prompt.unoffered = deque(
                (index, key) for index, key in prompt.unoffered if key not in lease.pages
            )
            number = self._add_lease(prompt, lease, [lease.pages[key] for _, key in leased])
            self._prefill_side.num_leased_pages += len(leased)
            pages = [(key[0], index, lease.pages[key]) for index, key in leased]
            self._send(messages.Offer(prompt.id, number, pages))

    def _offer_state(self, prompt: _LeasedPrompt) -> None:
        """Offer the snapshot of the recurrent states after a prompt, once it is computed."""
        if prompt.state_key is None:
            return
        lease = self._pages.lease_state(prompt.state_key)
        if lease is not None:
            prompt.state_key = None
            number = self._add_lease(prompt, lease, [])
            self._send(messages.OfferState(prompt.id, number, len(prompt.chain)))

    def _add_lease(self, prompt: _LeasedPrompt, lease: Lease, pages: list[int]) -> int:
        """Lease KV pages, or a snapshot, to the decode engine; return the number of the offer."""
        number = next(self._offer_numbers)
        self._leased[number] = _LeasedPages(
            prompt=prompt,
            lease=lease,
            pages=pages,
            expires_at_s=time.monotonic() + LEASE_S,
        )
        prompt.num_leases += 1
        return number

    def finish_if_done(self, prompt: _LeasedPrompt) -> None:
        """Tell the decode engine that no more pages of a prompt come, once all were offered."""
        with self._pages.lock:
            if not prompt.has_ended or self.prompts.get(prompt.id) is not prompt:
                return
            if not prompt.num_leases and prompt.has_more:
                self.offer(prompt)  # there is room now, or these pages were evicted
            if not prompt.num_leases:
                del self.prompts[prompt.id]
                self._send(messages.PrefillFinished(prompt.id, prompt.fault))

    # The receiving thread.

    def _welcome(self) -> bool:
        """Answer the decode engine's first message; return whether both can exchange KV pages."""
        hello = self._connection.receive()
        own_spec = self._prefill_side.spec
        if not isinstance(hello, messages.DecodeHello) or hello.version != messages.VERSION:
            reason: str | None = "another version of Twostroke"
        else:
            reason = own_spec.difference(hello.spec)
        if reason is not None:
            self._connection.send(messages.Refused(f"The prefill engine has {reason}."))
            return False
        num_pages = self._prefill_side.loop.facts.num_pages
        self._connection.send(messages.Welcome(messages.VERSION, own_spec, num_pages))
        return True

    def _handle(self, message: messages.DecodeMessage) -> None:
        match message:
            case messages.PrefillPrompt():
                self._prefill(message)
            case messages.FetchPages():
                if message.mode == SENT:
                    self._close_nixl()  # the decode engine has measured that NIXL is slower
                self._fetch(message)
            case messages.FetchState():
                self._fetch_state(message)
            case messages.Abort():
                self._abort(message.id)
            case messages.NixlJoin():
                self._join_nixl(message)
            case messages.NixlProbe():
                self._probe(message)
            case messages.DecodeHello():
                pass  # a duplicate

    def _prefill(self, message: messages.PrefillPrompt) -> None:
        """Offer the cached KV pages of a prompt; prefill the prompt if some are missing."""
        if message.id <= self._newest_id:
            return  # a duplicate
        self._newest_id = message.id
        page_size = self._prefill_side.spec.page_size
        request = Request(
            id=f"prefill-{next(_request_numbers)}",
            tokens=message.tokens,
            num_prompt=len(message.tokens),
            params=_PREFILL_ONLY,
            seed=0,
            priority=message.priority,
            salt=message.salt,
            tenant=message.salt.decode(errors="replace"),
            hints=Hints(shows_progress=True),
        )
        if self._pages.state_memory is not None:  # the decode engine needs the state at the end
            hints = Hints(shows_progress=True, shared_lengths=(len(message.tokens),))
            request.hints = hints
        num_pages = len(message.tokens) // page_size
        try:
            self._check(message)
            chain = PrefixChain(page_size, message.salt)
            chain.extend(message.tokens, num_pages)
            prompt = _LeasedPrompt(self, message.id, request, chain.keys)
            if self._pages.state_memory is not None:
                prompt.state_key = chain.keys[-1]
            for index, key in enumerate(chain.keys):
                for group, first in enumerate(message.first_pages):
                    if index >= first:
                        prompt.unoffered.append((index, (group, key)))
            with self._pages.lock:
                self.prompts[message.id] = prompt
                self._prefill_side.num_prompts += 1
                self.offer(prompt, num_pages)
                prompt.has_ended = not prompt.has_more  # all pages were cached
                self.finish_if_done(prompt)
                if prompt.has_more:
                    self._prefill_side.loop.submit([prompt])
        except TwostrokeError as error:
            with self._pages.lock:
                self.prompts.pop(message.id, None)
            self._send(messages.PrefillFinished(message.id, str(error)))

    def _check(self, message: messages.PrefillPrompt) -> None:
        """Raise ConnectionLostError if a message about a prompt is not valid.

        A decode engine with the same `spec` sends only prompts of full pages, with tokens of the
        vocabulary.
        """
        tokens, spec = message.tokens, self._prefill_side.spec
        vocab_size = self._prefill_side.client.card.cost.program.vocab_size
        has_full_pages = tokens and not len(tokens) % spec.page_size
        if not has_full_pages or min(tokens) < 0 or max(tokens) >= vocab_size:
            raise ConnectionLostError(
                "The prompt has no full pages, or tokens outside the vocabulary."
            )
        if len(message.first_pages) != len(spec.windows):
            raise ConnectionLostError("A prompt has another number of cache groups.")

    def _fetch(self, message: messages.FetchPages) -> None:
        with self._pages.lock:
            leased = self._leased.get(message.offer)
            is_written = message.mode == WRITTEN
            # Pages are written once, however often the message arrives.
            is_duplicate = is_written and message.number <= self._newest_written
            if leased is None or leased.has_ended or is_duplicate:
                self._send(messages.Content(message.number, is_valid=False))
                return
            leased.has_ended = message.is_last
            pages = [
                leased.pages[index] for index in message.indices if 0 <= index < len(leased.pages)
            ]
            content = messages.Content(message.number, is_valid=True)
            views: Iterable[memoryview[Any]] | None = None
            if message.mode == SENT:
                memory = self._pages.memory
                assert memory is not None
                views = map(memory.read, pages)
                content = replace(content, num_bytes=len(pages) * memory.page_bytes)
            leased.num_replies += 1
            if is_written:
                self._newest_written = message.number
            move = _NixlWrite(pages, message.targets) if is_written else None
            self._to_send.put(_PageReply(content, views, message.offer, move))

    def _fetch_state(self, message: messages.FetchState) -> None:
        """Send the snapshot of an offer."""
        with self._pages.lock:
            leased, memory = self._leased.get(message.offer), self._pages.state_memory
            has_ended = leased is None or leased.has_ended
            if leased is None or has_ended or memory is None or leased.lease.state_slot == NO_STATE:
                self._send(messages.Content(message.number, is_valid=False))
                return
            leased.has_ended = True
            leased.num_replies += 1
            content = messages.Content(message.number, is_valid=True, num_bytes=memory.page_bytes)
            views = [memory.read(leased.lease.state_slot)]
            self._to_send.put(_PageReply(content, views, message.offer))

    def _join_nixl(self, message: messages.NixlJoin) -> None:
        """Start a NIXL process and connect it with the NIXL process of the decode engine."""
        if self._nixl_process is not None:
            return  # a duplicate
        try:
            nixl_process = self._prefill_side.open_nixl()
            nixl_process.connect(message.address, MOVE_TIMEOUT_S)
        except NixlProcessError as error:
            self._send(messages.NixlJoined(None, str(error)))
            return
        self._nixl_process = nixl_process
        self._send(messages.NixlJoined(nixl_process.address))

    def _close_nixl(self) -> None:
        """End the NIXL process, so that it reads no KV pages of this engine any more."""
        if self._nixl_process is not None:
            self._nixl_process.close()
            self._nixl_process = None

    def _probe(self, message: messages.NixlProbe) -> None:
        content = messages.Content(message.number, is_valid=True)
        if message.mode == SENT:
            content = replace(content, num_bytes=PROBE_BYTES)
            self._to_send.put(_PageReply(content, [memoryview(bytes(PROBE_BYTES))]))
        else:
            self._to_send.put(_PageReply(content, nixl_write=_NixlWrite([], [])))

    def _abort(self, id_: int) -> None:
        with self._pages.lock:
            prompt = self.prompts.pop(id_, None)
            if prompt is None:
                return
            for number, leased in list(self._leased.items()):
                if leased.prompt is prompt:
                    leased.has_ended = True
                    self._release_if_ended(number)
        self._prefill_side.loop.cancel([prompt.request.id])

    def _release_if_ended(self, number: int) -> None:
        """Release the KV pages of an offer if its lease has ended and no reply still reads them."""
        leased = self._leased[number]
        if leased.has_ended and not leased.num_replies:
            prompt = leased.prompt
            del self._leased[number]
            self._pages.release(leased.lease)
            prompt.num_leases -= 1
            if not prompt.num_leases:
                self._pages.touch(prompt.chain)
            self.offer(prompt)
            self.finish_if_done(prompt)

    def _send(self, message: messages.PrefillMessage) -> None:
        self._to_send.put(_PageReply(message))

    # The sending thread.

    def _run_sender(self) -> None:
        """Send replies and the load to the decode engine, and end leases that have expired.

        This is the sending thread's function; it returns when the connection ends.
        """
        reported_s = 0.0
        try:
            while True:
                reply = None
                with suppress(queue.Empty):
                    reply = self._to_send.get(timeout=_POLL_S)
                    if reply is None:
                        return
                if reply is not None:
                    message = reply.message
                    if reply.nixl_write is not None:
                        message = self._write(reply, reply.nixl_write)
                    self._connection.send(message, reply.pages)
                    if reply.offer:
                        self._sent(reply.offer)
                now_s = time.monotonic()
                if now_s - reported_s >= _LOAD_INTERVAL_S:
                    reported_s = now_s
                    queue_flops, flops_per_s = self._prefill_side.load()
                    self._connection.send(
                        messages.PrefillLoad(queue_flops, flops_per_s, self._newest_id)
                    )
                    self._end_expired_leases(now_s)
        except BackendError:
            self.cut()

    def _write(self, reply: _PageReply, nixl_write: _NixlWrite) -> messages.PrefillMessage:
        """Write KV pages to the decode engine by NIXL; return the message to send afterwards."""
        leased = self._leased.get(reply.offer)
        if leased is not None and self.prompts.get(leased.prompt.id) is not leased.prompt:
            return replace(reply.message, is_valid=False)  # the prompt was aborted
        pages, targets = nixl_write.pages, nixl_write.targets
        if self._nixl_process is None or len(pages) != len(targets):
            raise ConnectionLostError("Pages cannot be written.")
        try:
            if pages or leased is None:  # a probe has no lease
                self._nixl_process.move(pages, targets, MOVE_TIMEOUT_S, is_write=True)
        except NixlProcessError:
            if leased is not None:
                raise
            return replace(reply.message, is_valid=False)
        return reply.message

    def _sent(self, number: int) -> None:
        with self._pages.lock:
            self._leased[number].num_replies -= 1
            self._release_if_ended(number)

    def _end_expired_leases(self, now_s: float) -> None:
        with self._pages.lock:
            expired = [
                number for number, leased in self._leased.items() if leased.expires_at_s < now_s
            ]
            for number in expired:
                self._prefill_side.num_expired_leases += not self._leased[number].has_ended
                self._leased[number].has_ended = True
                self._release_if_ended(number)

    def _release_all(self) -> None:
        """Release all leased KV pages and cancel all prompts, after the connection has ended."""
        with self._pages.lock:
            prompts = list(self.prompts.values())
            self.prompts = {}
            for number, leased in list(self._leased.items()):
                leased.has_ended = True
                leased.num_replies = 0
                self._release_if_ended(number)
        self._prefill_side.loop.cancel([prompt.request.id for prompt in prompts])


class _LeasedPrompt(RequestListener):
    """A prompt that a prefill engine computes for a decode engine.

    Attributes:
        id: the number of the prompt in the connection.
        chain: the keys of its pages.
        unoffered: index and key of pages that were not offered yet, in order.
        state_key: page key of the snapshot that was not offered yet; None without one.
        num_leases: offers whose leases have not ended.
        has_ended: whether its request has ended, or was not needed.
        fault: why the prefill failed.
    """

    def __init__(
        self, decode_engine: DecodeEngineConnection, id_: int, request: Request, chain: list[bytes]
    ) -> None:
        super().__init__(request, 0, Mailbox(self._end))
        self.id = id_
        self.chain = chain
        self.unoffered: deque[tuple[int, PageKey]] = deque()
        self.state_key: bytes | None = None
        self.num_leases = 0
        self.has_ended = False
        self.fault: str | None = None
        self._decode_engine = decode_engine

    @property
    def has_more(self) -> bool:
        """Whether some pages, or the snapshot, were not offered yet."""
        return bool(self.unoffered) or self.state_key is not None

    def take(self, delta: RequestDelta, now_s: float) -> Output | None:
        """Offer the KV pages that a step has completed to the decode engine.

        Returns an empty last output if the prefill has ended, and None before. The sampled token is
        dropped, because the decode engine samples all tokens.
        """
        del delta  # its token is dropped
        reason = self.request.finish_reason
        self._decode_engine.offer(self)
        if reason is None:
            return None
        self.first_token_s = self.last_token_s = now_s
        self.counter.begin(self.request, now_s)
        return self._complete(Output(self.index, "", ()), reason)

    def _end(self, output: Output) -> None:
        if output.finish_reason is not FinishReason.LENGTH:
            self.fault = str(output.error or "The prefill was not completed.")
        self.has_ended = True
        self._decode_engine.finish_if_done(self)


@dataclass(slots=True, eq=False)
class _LeasedPages:
    """The KV pages, or the snapshot, of an offer to a decode engine, and their lease.

    Attributes:
        prompt: the prompt to which the pages belong.
        lease: keeps the pages.
        pages: the pages in the order of the offer.
        expires_at_s: when the lease ends if the decode engine has not fetched the pages.
        num_replies: replies, not sent yet, that read the pages.
        has_ended: whether no more replies will read the pages.
    """

    prompt: _LeasedPrompt
    lease: Lease
    pages: list[int]
    expires_at_s: float
    num_replies: int = 0
    has_ended: bool = False


class _NixlWrite(Frozen):
    """A write by NIXL: the prefill engine's pages, and the decode engine's pages to overwrite.

    There are no pages for a probe.
    """

    pages: list[int]
    targets: list[int]


class _PageReply(Frozen):
    """A message to send to a decode engine, perhaps with KV pages.

    Attributes:
        message: the message.
        pages: bytes to send after it.
        offer: number of the offer from which the pages are; 0 if there is none.
        nixl_write: pages to write by NIXL before the message is sent.
    """

    message: messages.PrefillMessage
    pages: Iterable[memoryview[Any]] | None = None
    offer: int = 0
    nixl_write: _NixlWrite | None = None
