"""The operator's view of a server: metrics, its state, logs, traces."""
