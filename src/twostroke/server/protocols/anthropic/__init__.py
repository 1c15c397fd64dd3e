"""Anthropic's Messages API: requests, responses and tools."""
