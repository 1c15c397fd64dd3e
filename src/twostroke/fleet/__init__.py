"""Many servers: routing, the router, and servers on a cluster."""
