"""The loop that runs steps, the clients that feed it, and the one place that puts parts together."""
