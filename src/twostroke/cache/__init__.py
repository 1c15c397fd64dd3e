"""Key-value pages: the reference-counted pool and the prefix index over it."""
