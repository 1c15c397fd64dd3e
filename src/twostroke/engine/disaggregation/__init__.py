"""Disaggregated prefill and decode: one engine prefills, another fetches the KV pages and decodes.

The decode engine owns the request. It has a prefill engine compute the prompt, fetches full pages
as they are computed, computes the rest itself and samples all tokens. So seeds, constraints and
stop strings are never sent, and a prefill engine that dies costs time but no request.
"""
