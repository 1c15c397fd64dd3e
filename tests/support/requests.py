"""Random requests that share prefixes, tenants and continuations, as real traffic does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.fake_model import END, VOCAB_SIZE
from twostroke.core.request import Request
from twostroke.core.sampling import SamplingParams

if TYPE_CHECKING:
    import random

    from twostroke.core.request import Pooling

_STEMS = [[(7 * stem + 3 * i) % VOCAB_SIZE for i in range(40)] for stem in range(3)]


def make_request(
    request_id: str = "r",
    prompt: list[int] | int = 5,
    *,
    priority: int = 0,
    tenant: str = "",
    weight: float = 1.0,
    salt: bytes = b"",
    end_ids: frozenset[int] = frozenset(),
    seed: int = 0,
    max_tokens: int | None = 4,
    min_tokens: int = 0,
    prompt_logprobs: int | None = None,
    presence_penalty: float = 0.0,
    cuts_limit: bool = False,
    pooling: Pooling | None = None,
) -> Request:
    """Return a request with a given prompt, or with a prompt of a given length."""
    tokens = list(range(1, prompt + 1)) if isinstance(prompt, int) else list(prompt)
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        prompt_logprobs=prompt_logprobs,
        presence_penalty=presence_penalty,
    )
    return Request(
        request_id,
        tokens,
        len(tokens),
        params,
        seed,
        end_ids=end_ids,
        priority=priority,
        tenant=tenant,
        weight=weight,
        salt=salt,
        arrival_s=1.0,
        cuts_limit=cuts_limit,
        pooling=pooling,
    )


def random_windows(rng: random.Random) -> tuple[int | None, ...]:
    """Return the window of each cache group: often one group without a window, or several kinds."""
    if rng.random() < 0.4:
        return (None,)
    short_window, long_window = rng.randint(1, 7), rng.randint(5, 30)
    return rng.choice(
        [
            (short_window,),
            (None, short_window),
            (None, long_window, long_window),
            (short_window, long_window),
            (None, None, short_window),
        ]
    )


def random_request(
    rng: random.Random, request_id: str, room: int, earlier: list[Request]
) -> Request:
    """Return a random request of at most `room` tokens, answer included.

    Its prompt is a beginning of a common text, or the next turn after one of the `earlier`
    requests.
    """
    salt = rng.choice((b"", b"", b"one", b"two"))
    prompt_logprobs = 0 if rng.random() < 0.3 else None
    max_tokens = min(rng.choice((1, 3, 8, 20)), room - 1)
    if prompt_logprobs is not None and rng.random() < 0.5:
        max_tokens = 0
    if earlier and rng.random() < 0.4:
        before = rng.choice(earlier)
        stem, salt = before.tokens, before.salt
    else:
        stem = rng.choice(_STEMS)[: rng.randint(0, 40)]
    tail = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((0, 0, 1, 3, 9)))]
    prompt = (stem + tail)[: max(1, room - max_tokens)] or [1]
    return make_request(
        request_id,
        prompt,
        priority=rng.choice((0, 0, 0, -1, 1, 2)),
        salt=salt,
        end_ids=frozenset({END}) if rng.random() < 0.8 else frozenset(),
        seed=rng.randrange(3),
        max_tokens=max_tokens if rng.random() < 0.8 or not max_tokens else None,
        min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.3 else 0,
        prompt_logprobs=prompt_logprobs,
        presence_penalty=rng.choice((0.0, 0.0, 1.0)),  # then it cannot draw ahead
    )
