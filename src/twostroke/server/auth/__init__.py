"""Tenants: their keys in the records, what these may use, and what they have used."""
