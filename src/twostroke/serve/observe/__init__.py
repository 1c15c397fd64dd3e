"""What operators see of a server: metrics, its state, logs, traces."""
