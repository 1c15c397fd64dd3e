"""The HTTP layer: connections, body limits, errors in each protocol's form, streams."""
