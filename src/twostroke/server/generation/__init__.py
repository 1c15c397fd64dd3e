"""One request from job to response: events, streams, checks, stored responses."""
