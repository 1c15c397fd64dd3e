"""Speculative decoding: guesses of the next tokens, and how many of them a step takes.

Drafts are rows like any other. A step draws a token after each of them, and the scheduler keeps
those that follow right drafts (`core.tree.right_drafts`). So nothing here can change an answer: it
can only cost or save time.

The worth of a guess follows from two estimates. `AcceptanceRate` learns how often guesses of each
kind are right; `StepTimeModel` learns how long steps with so many rows take. Together they give a
`DraftCost`, which tells proposers how likely a guess must be, and the number of guesses with the
most expected tokens a second. `Speculator` puts these guesses into steps, keeps account of what
each proposer has really saved, and lets one that loses rest for a while.
"""

from twostroke.engine.speculation.acceptance import AcceptanceRate
from twostroke.engine.speculation.draft_model import DraftModel, TokenTranslator
from twostroke.engine.speculation.heads import EagleHeads, MedusaHeads
from twostroke.engine.speculation.lookahead import Lookahead
from twostroke.engine.speculation.ngram import NgramProposer
from twostroke.engine.speculation.payoff import Always, WhilePaying, budgets
from twostroke.engine.speculation.proposal import (
    DraftCost,
    DraftOutcome,
    Proposal,
    Proposer,
    Watcher,
    drawn_rows,
)
from twostroke.engine.speculation.speculator import (
    SpeculationStats,
    Speculator,
    StepDrafts,
    TimedStep,
)
from twostroke.engine.speculation.step_time import StepTimeModel

__all__ = [
    "AcceptanceRate",
    "Always",
    "DraftCost",
    "DraftModel",
    "DraftOutcome",
    "EagleHeads",
    "Lookahead",
    "MedusaHeads",
    "NgramProposer",
    "Proposal",
    "Proposer",
    "SpeculationStats",
    "Speculator",
    "StepDrafts",
    "StepTimeModel",
    "TimedStep",
    "TokenTranslator",
    "Watcher",
    "WhilePaying",
    "budgets",
    "drawn_rows",
]
