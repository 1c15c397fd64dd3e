"""The command line: pull, generate, chat, serve, models, doctor."""
