"""Which precision each part of a model needs: measured by a tree, chosen by a knapsack."""

from twostroke.backends.activation_bits.choice import (
    METHOD,
    MIN_WEIGHTS,
    RightAnswers,
    checking_text,
    choose,
    choosing_text,
)
from twostroke.backends.activation_bits.products import Product, products_of
from twostroke.backends.activation_bits.tree import allocate

__all__ = [
    "METHOD",
    "MIN_WEIGHTS",
    "Product",
    "RightAnswers",
    "allocate",
    "checking_text",
    "choose",
    "choosing_text",
    "products_of",
]
