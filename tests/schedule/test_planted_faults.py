"""The state machine must catch what it is there to catch: faults planted on purpose."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from support.machine import SchedulerMachine
from twostroke.cache import PageGroups, PagePool, PrefixChain, PrefixHit, PrefixIndex
from twostroke.core.request import NO_PAGE
from twostroke.schedule import Scheduler
from twostroke.schedule.drafting import Drafting
from twostroke.schedule.holdings import Holdings

_MANY = 3000  # examples, until one catches the fault: what it takes to meet some is rare

SETTINGS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)


class FreesWhatIsShared(PagePool):
    """The first release frees, whoever else still reads."""

    def release(self, pages):
        for page in pages:
            if self._counts[page] == 1:
                super().release([page])
            elif self._counts[page] > 1:
                self._counts[page] = 1
                super().release([page])


class LeaksAPage(PagePool):
    """Releasing many pages forgets one."""

    def release(self, pages):
        super().release(pages[:-1] if len(pages) > 3 else pages)


class HandsOutTwice(PagePool):
    """An allocated page stays in the free list when it is the last one there."""

    def allocate(self, count):
        pages = super().allocate(count)
        if not self._free:
            self._free.append(pages[-1])
        return pages


class RemembersTheEvicted(PrefixIndex):
    """An evicted page keeps its key."""

    def _forget(self, page):
        del self._keys[page]


class Unsalted(PrefixIndex):
    """Tenants share a cache."""

    def chain(self, salt):
        return super().chain(b"")


class PageAloneChain(PrefixChain):
    """A page's key does not depend on the pages before it."""

    def extend(self, tokens, num_pages):
        size = self._page_size
        for i in range(len(self.keys), num_pages):
            page = tokens[i * size : (i + 1) * size]
            self.keys.append(sha256(self._root + repr(page).encode()).digest())


class Unchained(PrefixIndex):
    def chain(self, salt):
        return PageAloneChain(self._pool.page_size, salt)


class LeavesNoToken(PrefixIndex):
    """A prompt that is wholly cached is not computed at all, and has no logits."""

    def match(self, chain, tokens, num_prompt):
        return super().match(chain, [*tokens, 0], num_prompt + 1)


class GivesBackInFlight(Scheduler):
    """The pages of a request that ends during a step are free at once."""

    def finish(self, request, reason):
        flight, self._flight = self._flight, None
        try:
            return super().finish(request, reason)
        finally:
            self._flight = flight


class CountsTooEarly(Scheduler):
    """A preempted request believes that its tokens are still computed."""

    def _preempt(self, victim, draft):
        self._running.pop()
        draft.preempt(victim)
        self._give_back(victim)
        victim.request.num_preemptions += 1
        self._waiting.put_back(victim)

    def _start(self, ticket, hit):
        before = ticket.request.num_computed
        super()._start(ticket, hit)
        if before:
            request = ticket.request
            missing = -(-before // self._pool.page_size) - len(request.pages[0])
            self._holdings.grow(request, max(0, missing))
            request.num_computed = max(before, request.num_computed)


class LosesTheVictim(Scheduler):
    """A preempted request is put nowhere."""

    def _preempt(self, victim, draft):
        super()._preempt(victim, draft)
        self._waiting.remove(victim)


class StarvesTheFirst(Scheduler):
    """The best-ranked request is the one that gives way."""

    def plan(self):
        self._running.reverse()
        try:
            return super().plan()
        finally:
            self._running.sort(key=lambda ticket: ticket.rank)


class SeesTooLittle(PageGroups):
    """A row's own position does not count among those of its window, so pages go too early."""

    def first_seen(self, num_computed):
        return super().first_seen(num_computed + 1)


class ShortWindows(PagePool):
    def __init__(self, num_pages, page_size, windows=(None,)):
        super().__init__(num_pages, page_size, windows)
        self.groups = SeesTooLittle(page_size, windows)


class OneGroupCounts(PageGroups):
    """What a request needs is counted as if all groups shared their pages."""

    def most_tokens(self, num_pages, limit, num_rows=1):
        return super().most_tokens(num_pages * len(self.windows), limit, num_rows)


class TooFewPages(PagePool):
    def __init__(self, num_pages, page_size, windows=(None,)):
        super().__init__(num_pages, page_size, windows)
        self.groups = OneGroupCounts(page_size, windows)


class OverlooksAMissingPage(PrefixIndex):
    """A hit needs the pages of the first group only; another page stands in for a missing one."""

    def match(self, chain, tokens, num_prompt):
        super().match(chain, tokens, num_prompt)
        keys = chain.keys[: self.num_reusable(len(tokens) - 1, num_prompt)]
        num_places = next((i for i, key in enumerate(keys) if key not in self._pages[0]), len(keys))
        firsts = self._pool.groups.first_seen(num_places * self._pool.page_size)
        pages = []
        for known, first in zip(self._pages, firsts, strict=True):
            found = [known.get(key, self._pages[0][key]) for key in keys[first:num_places]]
            pages.append([NO_PAGE] * first + found)
        return PrefixHit(pages, num_places)


class MixesUpGroups(PrefixIndex):
    """A page is known by its tokens alone, whichever layers' keys and values it holds."""

    def __init__(self, pool, *, reuse_generated=True):
        super().__init__(pool, reuse_generated=reuse_generated)
        self._pages = [self._pages[0]] * len(self._pages)


class KeepsAllPages(Scheduler):
    """Nothing is given back before the end."""

    def _settle(self, ticket):
        self._prefixes.publish(ticket)


class ForgetsToGiveBack(Holdings):
    """A page behind a window is forgotten, and its reference stays."""

    def leave_behind(self, ticket):
        firsts = self._groups.first_seen(ticket.request.num_computed)
        for pages, first in zip(ticket.request.pages, firsts, strict=True):
            pages[:first] = [NO_PAGE] * first


class LeaksBehindWindows(Scheduler):
    def __init__(self, config, pool, index, policy, clock):
        super().__init__(config, pool, index, policy, clock)
        self._holdings = ForgetsToGiveBack(pool, config.token_budget)


class KeepsItsOwnPages(Drafting):
    """A branch's drafts were right, and the request goes on with the pages of another path."""

    def settle(self, piece, last):
        super().settle(piece, min(last, piece.branches[0].first - 1))


class TakesTheLastBranch(Drafting):
    """Whichever branch was right, the last one's pages are taken."""

    def settle(self, piece, last):
        super().settle(piece, max(last, piece.branches[-1].first))


class LeaksBranches(Drafting):
    """Branches that were wrong keep their pages."""

    def settle(self, piece, last):
        pool, self._pool = self._pool, SimpleNamespace(release=list)
        super().settle(piece, last)
        self._pool = pool


class SharesAPage(Drafting):
    """Branches that leave the same path write to the same page."""

    def _branches(self, *given):
        found = super()._branches(*given)
        if len(found) > 1:
            found[1] = replace(found[1], pages=found[0].pages, num_own=found[0].num_own)
        return found


class FaultyDrafting(Scheduler):
    drafting_class = Drafting

    def __init__(self, config, pool, index, policy, clock):
        super().__init__(config, pool, index, policy, clock)
        self._drafting = self.drafting_class(pool, self._holdings)


BRANCH_FAULTS = [
    KeepsItsOwnPages,
    TakesTheLastBranch,
    LeaksBranches,
    SharesAPage,
]

FAULTS = {
    FreesWhatIsShared: "pool_class",
    LeaksAPage: "pool_class",
    HandsOutTwice: "pool_class",
    RemembersTheEvicted: "index_class",
    Unsalted: "index_class",
    Unchained: "index_class",
    LeavesNoToken: "index_class",
    GivesBackInFlight: "scheduler_class",
    CountsTooEarly: "scheduler_class",
    LosesTheVictim: "scheduler_class",
    StarvesTheFirst: "scheduler_class",
    ShortWindows: "pool_class",
    TooFewPages: "pool_class",
    OverlooksAMissingPage: "index_class",
    MixesUpGroups: "index_class",
    KeepsAllPages: "scheduler_class",
    LeaksBehindWindows: "scheduler_class",
}


def catches(num_examples: int = 300, num_steps: int = 30, **replaced) -> bool:
    machine = type("Machine", (SchedulerMachine,), {**replaced, "counts": Counter()})
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(SETTINGS, max_examples=num_examples, stateful_step_count=num_steps),
        )
    except (AssertionError, KeyError, IndexError):
        return True
    return False


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_is_caught(fault):
    assert catches(**{FAULTS[fault]: fault})


@pytest.mark.parametrize("fault", BRANCH_FAULTS, ids=lambda fault: fault.__name__)
def test_fault_of_branches_is_caught(fault):
    scheduler_class = type("Faulty", (FaultyDrafting,), {"drafting_class": fault})
    assert catches(num_examples=_MANY, scheduler_class=scheduler_class)


@pytest.mark.parametrize(
    "fault",
    [
        FreesWhatIsShared,
        HandsOutTwice,
        RemembersTheEvicted,
        Unsalted,
        Unchained,
        CountsTooEarly,
        ShortWindows,
        OverlooksAMissingPage,
        MixesUpGroups,
    ],
    ids=lambda fault: fault.__name__,
)
def test_tokens_alone_betray_wrong_pages(fault):
    """Without looking into the parts: what a page holds shows in what is generated."""
    assert catches(**{FAULTS[fault]: fault}, does_check=False)


def test_reuse_of_generated_pages_is_caught_where_rows_are_computed_differently():
    # A page of generated rows must become full, and a later prompt begin with its words.
    assert catches(num_examples=1000, num_steps=80, is_strict=False, windows=(None,))


def test_nothing_is_caught_where_nothing_is_wrong():
    assert not catches(num_examples=100)
