"""Links between hosts, over engines such as UCX and Gloo that move the bytes of collectives."""
