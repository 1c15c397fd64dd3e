"""`make long SUITE=structured-output`: whether constrained answers keep to their forms.

Three parts, all of them unless some are named: `answers` of a real model, the instances of the JSON
Schema Test `suite`, and random `walks` through grammars.
"""

from __future__ import annotations

import argparse
import sys

import answers
import suite
import walks

_PARTS = {"suite": suite, "walks": walks, "answers": answers}


def main() -> int:
    """Run the parts, and return 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(_PARTS))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seed", type=int, default=0)
    for part in _PARTS.values():
        part.add_options(parser)
    args = parser.parse_args()
    if unknown := set(args.parts) - set(_PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: {', '.join(_PARTS)}")
    outcomes = [_PARTS[name].run(args) for name in args.parts or _PARTS]
    return int(not all(outcomes))


if __name__ == "__main__":
    sys.exit(main())
