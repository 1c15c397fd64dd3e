"""The forms of errors in each protocol but OpenAI's."""
