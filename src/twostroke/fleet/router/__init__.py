"""One address before many servers: which of them gets a request, and what becomes of it there."""
