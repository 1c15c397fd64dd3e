"""Routing decisions without I/O: which replica gets a request. `twostroke simulate` uses them."""
