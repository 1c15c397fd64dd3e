"""How operators see a server: metrics, health, the dashboard's state and traces."""
