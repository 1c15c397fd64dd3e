"""Servers and a router on the machines of a cluster: started, monitored, replaced, scaled."""
