"""Patterns for string formats that are regular languages. Only valid strings match.

Some patterns are narrower than the standards, where programs do not use all of a standard: a leap
second is in UTC, a host name has at most four labels, and times have capital letters.
"""

from __future__ import annotations

from typing import Final

_YEAR: Final = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # from 0001
# Years that 4 divides, except hundreds that 400 does not divide.
_LEAP: Final = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE: Final = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP}-02-29)"
)
_TIME: Final = (
    "(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    "|23:59:60(?:\\.[0-9]{1,9})?(?:Z|[+-]00:00))"
)
_CLOCK: Final = (
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_HOURS: Final = "(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS: Final = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_DURATION: Final = f"P(?:{_DAYS}(?:T{_HOURS})?|T{_HOURS}|[0-9]+W)"

# At most 61 characters, and no two hyphens, which mark names in other alphabets.
_LABEL: Final = "[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,30}"
_HOST: Final = f"{_LABEL}(?:\\.{_LABEL}){{0,3}}"
_ATOM: Final = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"
_EMAIL: Final = f"{_ATOM}(?:\\.{_ATOM}){{0,2}}@{_HOST}"

_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4: Final = f"{_BYTE}\\.{_BYTE}\\.{_BYTE}\\.{_BYTE}"
_WORD: Final = "[0-9a-fA-F]{1,4}"


def _ipv6() -> str:
    """Return a regular expression of IPv6 addresses; `::` may replace one run of zeros."""
    last = f"(?:{_WORD}:{_WORD}|{_IPV4})"
    forms = [f"(?:{_WORD}:){{6}}{last}"]
    for before in range(8):  # at most this many words before the `::`
        head = "" if before == 0 else f"(?:(?:{_WORD}:){{0,{before - 1}}}{_WORD})?"
        after = 7 - before
        tails = {0: "", 1: _WORD}
        tail = tails.get(after, f"(?:{_WORD}:){{{after - 2}}}{last}")
        forms.append(f"{head}::{tail}")
    return f"(?:{'|'.join(forms)})"


_HEX: Final = "[0-9a-fA-F]"
_UUID: Final = f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"

_IN_PATH: Final = f"(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%{_HEX}{_HEX})"
_AFTER_PATH: Final = f"(?:\\?(?:[/?]|{_IN_PATH})*)?(?:#(?:[/?]|{_IN_PATH})*)?"
_AUTHORITY: Final = f"//(?:[a-zA-Z0-9._~-]+@)?(?:{_HOST}|{_IPV4})(?::[0-9]{{1,4}})?"
_PATH: Final = f"(?:/{_IN_PATH}*)*"
_SCHEME: Final = "[a-zA-Z][a-zA-Z0-9+.-]*:"
_URI: Final = f"{_SCHEME}(?:{_AUTHORITY}{_PATH}|/?{_IN_PATH}+{_PATH}){_AFTER_PATH}"
_SEGMENT: Final = f"(?:[a-zA-Z0-9._~!$&'()*+,;=@-]|%{_HEX}{_HEX})"  # without a colon
_REFERENCE: Final = (
    f"(?:{_URI}|{_AUTHORITY}{_PATH}{_AFTER_PATH}|(?:/{_IN_PATH}+{_PATH}|{_SEGMENT}+{_PATH})"
    f"{_AFTER_PATH}|#(?:[/?]|{_IN_PATH})*)"
)
_POINTER: Final = "(?:/(?:[^/~]|~[01])*)*"

FORMATS: Final[dict[str, str]] = {
    name: f"^(?:{pattern})$"
    for name, pattern in {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}T{_CLOCK}",
        "duration": _DURATION,
        "email": _EMAIL,
        "idn-email": _EMAIL,
        "hostname": _HOST,
        "idn-hostname": _HOST,
        "ipv4": _IPV4,
        "ipv6": _ipv6(),
        "uuid": _UUID,
        "uri": _URI,
        "iri": _URI,
        "uri-reference": _REFERENCE,
        "iri-reference": _REFERENCE,
        "uri-template": _REFERENCE,
        "json-pointer": _POINTER,
        "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    }.items()
}
