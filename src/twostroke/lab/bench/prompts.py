"""Writes texts of a wanted number of tokens, from words that most tokenizers know as one token."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from twostroke.lab.simulator.load import RequestArrival

# Short English words. With a space before it, each is one token of the vocabularies of GPT-2,
# Llama 3, Qwen and others.
_WORD_LIST: Final = (
    "about above after again air all also always and another any are around ask away back because "
    "been before began being below best between big both boy but call came can car change city "
    "close cold come could country course cut day did different does door down draw each early "
    "earth east eat end enough even ever every example eye face fall family far farm fast father "
    "feet few find fire first fish five food for form found four free from full gave get girl give "
    "go gold good got government great green ground group grow had half hand hard has have head "
    "hear heat help her here high hill him his hold home horse hot hour house how hundred idea if "
    "inch into island just keep kind king knew know land large last late learn leave left less let "
    "letter life light like line list little live long look love low made make man many map mark"
)
WORDS: Final = tuple(_WORD_LIST.split(" "))
_MAX_OFFSET: Final = 1 << 30  # of request numbers, so that runs do not share prompts


class PromptSizes(Frozen):
    """How many tokens an endpoint counts for texts of `WORDS`.

    Attributes:
        tokens_per_word: the mean over all words.
        overhead: tokens that each prompt has besides its words, such as the chat template's.
    """

    tokens_per_word: float = 1.0
    overhead: int = 0

    def num_words(self, num_tokens: int) -> int:
        """Return how many words make a prompt of about this many tokens, at least 1."""
        return max(1, round((num_tokens - self.overhead) / self.tokens_per_word))


class PromptWriter:
    """Writes the prompts of a run.

    Prompts of two runs have no common prefix, because a server may still have the prompts of the
    first run cached.
    """

    def __init__(self, sizes: PromptSizes, salt: int) -> None:
        """Write prompts for an endpoint; prompts of different salts have no common prefix."""
        rng = random.Random(salt)
        self._sizes = sizes
        self._words = rng.sample(WORDS, len(WORDS))
        self._offset = rng.randrange(_MAX_OFFSET)

    def write(self, arrival: RequestArrival, number: int) -> str:
        """Return the text of a request's prompt, which begins with its shared prefixes."""
        sizes = self._sizes
        in_words = replace(
            arrival,
            num_prompt=sizes.num_words(arrival.num_prompt),
            block_size=max(1, round(arrival.block_size / sizes.tokens_per_word)),
            num_shared=round(arrival.num_shared / sizes.tokens_per_word),
        )
        words = self._words
        return " ".join(
            [words[index] for index in in_words.tokens(self._offset + number, len(words))]
        )
