"""A short campaign of damaged KV pages, which can be interrupted and continued."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exact.kv_offload import Files, damage_pages

if TYPE_CHECKING:
    from pathlib import Path


def test_a_campaign_goes_on_with_the_faults_that_it_would_have_had(tmp_path: Path) -> None:
    def play(first: int, last: int) -> dict[str, int]:
        folder = tmp_path / f"{first} {last}"
        folder.mkdir()
        return damage_pages(range(first, last), "1 files", Files(folder))

    whole_play, begin, rest = play(0, 60), play(0, 25), play(25, 60)
    assert sum(whole_play.values()) == 60
    assert whole_play == {name: begin.get(name, 0) + rest.get(name, 0) for name in whole_play}
    assert "WRONG" not in whole_play
