"""The web UI at `/`: a playground and a live dashboard, without a build step."""
