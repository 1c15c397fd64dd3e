"""The page for people at `/`: a playground and a live dashboard, without a build step."""
