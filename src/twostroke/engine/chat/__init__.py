"""Conversations: chat templates, tools and reasoning, and the reader of answers."""
