"""What a model is: its Program, families, formats, weights and tokenizer, and where files come from."""
