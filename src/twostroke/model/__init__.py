"""What a model is: its Program, families, formats, weights, tokenizer, and its files."""
