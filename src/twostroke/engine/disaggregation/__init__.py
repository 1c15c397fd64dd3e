"""Prefill and decode apart: one engine reads a prompt, another one fetches the pages and answers.

The decode engine owns the request. It asks a prefill engine to read the prompt, fetches full pages
as they are computed, computes the rest and draws all tokens itself. So seeds, constraints and stop
strings never travel, and a prefill engine that dies costs time, not a request.
"""
