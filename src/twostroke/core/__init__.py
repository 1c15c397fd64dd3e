"""Types, options, errors, files and transport that every package shares; computes nothing."""
