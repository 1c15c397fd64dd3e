"""Speculative decoding: drafts of the next tokens, and how many of them to use in a step.

Drafts are rows like any other. A step samples a token after each of them, and the scheduler keeps
the tokens that follow accepted drafts (`core.draft_tree.accepted_drafts`). So speculation never
changes an answer; it only costs or saves time.

The value of a draft follows from two estimates. `AcceptanceRate` learns how often drafts of each
kind are right, and `StepTimeModel` learns the time of steps by their number of rows. Together they
give the `DraftCost`, by which proposers decide how likely a draft must be, and the number of drafts
with the most expected tokens per second. The `Speculator` adds these drafts to steps, measures the
time that each proposer really saves, and lets a proposer that loses time rest for a while.
"""

from twostroke.engine.speculation.acceptance import AcceptanceRate
from twostroke.engine.speculation.draft_model import DraftModel, TokenTranslator
from twostroke.engine.speculation.heads import EagleHeads, MedusaHeads
from twostroke.engine.speculation.lookahead import Lookahead
from twostroke.engine.speculation.ngram import NgramProposer
from twostroke.engine.speculation.payoff import FixedDraftBudget, PayingDraftBudget, budget_function
from twostroke.engine.speculation.proposal import (
    DraftCost,
    DraftOutcome,
    Proposal,
    Proposer,
    Watcher,
    sampled_rows,
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
    "DraftCost",
    "DraftModel",
    "DraftOutcome",
    "EagleHeads",
    "FixedDraftBudget",
    "Lookahead",
    "MedusaHeads",
    "NgramProposer",
    "PayingDraftBudget",
    "Proposal",
    "Proposer",
    "SpeculationStats",
    "Speculator",
    "StepDrafts",
    "StepTimeModel",
    "TimedStep",
    "TokenTranslator",
    "Watcher",
    "budget_function",
    "sampled_rows",
]
