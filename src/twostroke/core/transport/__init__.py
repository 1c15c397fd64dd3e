"""Frames over sockets, which processes of one version exchange."""
