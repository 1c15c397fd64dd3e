"""Chooses the bits of activations for each product of a model, from measured errors."""

from twostroke.backends.activation_bits.choice import (
    FULL_SEARCH,
    METHOD,
    MIN_WEIGHTS,
    QUICK_SEARCH,
    ExpectedLogits,
    checking_text,
    choose,
    choosing_text,
    is_certain,
    mean_of,
)
from twostroke.backends.activation_bits.products import Product, products_of
from twostroke.backends.activation_bits.tree import allocate

__all__ = [
    "FULL_SEARCH",
    "METHOD",
    "MIN_WEIGHTS",
    "QUICK_SEARCH",
    "ExpectedLogits",
    "Product",
    "allocate",
    "checking_text",
    "choose",
    "choosing_text",
    "is_certain",
    "mean_of",
    "products_of",
]
