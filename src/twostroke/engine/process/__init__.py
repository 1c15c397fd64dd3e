"""An engine in its own process: messages, supervisor, recovery."""
