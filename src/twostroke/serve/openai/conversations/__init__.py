"""OpenAI's conversations: lists of items that responses read and continue."""
