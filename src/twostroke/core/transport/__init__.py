"""Messages over sockets between processes of the same version."""
