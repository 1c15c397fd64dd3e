"""Speculative decoding: who guesses the next tokens, and how many guesses a step takes.

Drafts are rows like any other. A step draws a token behind each of them, and the scheduler keeps
those behind drafts that were right (`core.tree.right_drafts`), so nothing here can change an
answer: it can only cost or save time.

Whether to guess at all is asked at four levels, from a step down to a request:

- `WhilePaying` (choice): can any guess pay beside a step of so many rows? Not in a full batch.
- `Balance`: have this proposer's guesses been worth what they took? If not, it rests for a while.
- `Hope`: has the first guess been right often enough lately, of this request and of all? It is for
  proposers whose guesses cost time before anybody knows their odds: a draft, heads, lookahead.
- `Odds`: how often were guesses of just this kind right? They say how many of a proposal to take.
"""

from twostroke.spec.choice import Always, Chooser, WhilePaying
from twostroke.spec.context import ContextProposer
from twostroke.spec.draft import DraftModel
from twostroke.spec.eagle import EagleHeads
from twostroke.spec.follower import Words
from twostroke.spec.guesses import HeadsOdds
from twostroke.spec.lookahead import Lookahead
from twostroke.spec.medusa import MedusaHeads
from twostroke.spec.pace import Pace
from twostroke.spec.proposal import Outcome, Price, Proposal, Proposer, Watcher
from twostroke.spec.speculator import Speculator
from twostroke.spec.stats import SpeculationStats, TimedStep

__all__ = [
    "Always",
    "Chooser",
    "ContextProposer",
    "DraftModel",
    "EagleHeads",
    "HeadsOdds",
    "Lookahead",
    "MedusaHeads",
    "Outcome",
    "Pace",
    "Price",
    "Proposal",
    "Proposer",
    "SpeculationStats",
    "Speculator",
    "TimedStep",
    "Watcher",
    "WhilePaying",
    "Words",
]
