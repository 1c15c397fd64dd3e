"""One API request from job to response: events, streams, schema checks, stored responses."""
