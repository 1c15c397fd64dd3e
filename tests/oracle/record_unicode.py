"""Records which characters the two halves of Hugging Face's `tokenizers` do not know.

The engine of its patterns is asked itself; its normal forms are those of Unicode 9.0 (the crate
unicode-normalization-alignments), whose unassigned code points Perl knows. Needs Perl 5.30+.

PYTHONPATH=src:tests .venv-oracle/bin/python tests/oracle/record_unicode.py
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import tokenizers

from support.character_classes import EVERY, there

if TYPE_CHECKING:
    from collections.abc import Iterable

TABLE = Path(__file__).parents[2] / "src/twostroke/tokenize/unicode_ages.py"
_PERL = r"""
for my $c (0..0x10ffff) {
    next if $c >= 0xd800 && $c <= 0xdfff;
    print "$c\n" if chr($c) =~ /\P{Present_In: 9.0}/ && chr($c) !~ /\p{Co}/;
}
"""
_HEAD = '''\
"""Which code points `tokenizers` {version} does not know; made by tests/oracle/record_unicode.py.

Pairs of hexadecimal numbers: how many code points are known, then how many are not, and so on.
"""

UNKNOWN_TO_PATTERNS = """
{patterns}
"""

UNKNOWN_TO_NORMAL_FORMS = """
{forms}
"""
'''


def main() -> None:
    """Write the table."""
    run = subprocess.run(["perl", "-e", _PERL], capture_output=True, check=True, text=True)
    tables = {
        "patterns": _packed(map(ord, there(r"\p{Cn}", EVERY))),
        "forms": _packed(map(int, run.stdout.split())),
    }
    TABLE.write_text(_HEAD.format(version=tokenizers.__version__, **tables), encoding="ascii")


def _packed(codes: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for code in sorted(codes):
        if runs and runs[-1][1] == code:
            runs[-1][1] += 1
        else:
            runs.append([code, code + 1])
    numbers, end = [], 0
    for first, after in runs:
        numbers += [f"{first - end:x}", f"{after - first:x}"]
        end = after
    return fill(" ".join(numbers), 98)


if __name__ == "__main__":
    main()
