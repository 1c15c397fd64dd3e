"""The HTTP face: OpenAI's and Anthropic's protocols, streaming, health, metrics.

`run_server` is what the command line uses, `create_app` an ASGI application for other servers.
They are imported from `twostroke.server.run` and `twostroke.server.middleware`.
"""
