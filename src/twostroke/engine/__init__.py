"""The loop that runs steps, the clients that feed it, and `build`, which puts parts together."""
