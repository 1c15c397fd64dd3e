"""Chooses the bits of activations for each product of a model, from measured errors."""

from twostroke.backends.activation_bits.choice import (
    METHOD,
    MIN_WEIGHTS,
    ExpectedLogits,
    checking_text,
    choose,
    choosing_text,
)
from twostroke.backends.activation_bits.products import Product, products_of
from twostroke.backends.activation_bits.tree import allocate

__all__ = [
    "METHOD",
    "MIN_WEIGHTS",
    "ExpectedLogits",
    "Product",
    "allocate",
    "checking_text",
    "choose",
    "choosing_text",
    "products_of",
]
