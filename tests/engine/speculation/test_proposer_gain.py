"""A proposer whose drafts lose time is not asked for some rounds, more of them each time."""

from __future__ import annotations

from twostroke.engine.speculation.payoff import ProposerGain


def rounds_until(account: ProposerGain, may_ask: bool, won: float = 0.0, spent: float = 0.0) -> int:
    """Run rounds until the proposer may be asked (`may_ask`), or may not; return their number."""
    for count in range(5000):
        if account.may_ask() is may_ask:
            return count
        if not may_ask:
            account.add(won, spent)
    raise AssertionError("it never happened")


def test_a_proposer_that_wins_is_always_asked() -> None:
    account = ProposerGain()
    for _ in range(1000):
        assert account.may_ask()
        account.add(0.5, 0.4)


def test_a_proposer_that_loses_pauses_twice_as_long_each_time() -> None:
    account = ProposerGain()
    assert rounds_until(account, False, 0.1, 0.3) == 11
    rests = [rounds_until(account, True)]
    lost = []
    for _ in range(6):
        lost.append(rounds_until(account, False, 0.1, 0.3))
        rests.append(rounds_until(account, True))
    assert rests == [62, 126, 254, 510, 1022, 1022, 1022]
    assert lost == [6] * 6  # a trial costs a step and a bit


def test_success_is_saved_up_to_a_limit_and_ends_long_rests() -> None:
    account = ProposerGain()
    for _ in range(3):
        rounds_until(account, False, 0.0, 0.4)
        rounds_until(account, True)
    for _ in range(100):
        account.add(1.0, 0.2)
    assert rounds_until(account, False, 0.0, 0.3) == 10
    assert rounds_until(account, True) == 62


def test_one_long_round_or_many_short_ones_do_not_overdraw_an_account() -> None:
    account = ProposerGain()
    account.add(0.0, 40.0)
    assert account.may_ask()
    for _ in range(10_000):
        account.add(0.0, 0.004)
        assert account.may_ask()
