"""Models of the Hugging Face hub: names, what to fetch of a repository, and its shared cache."""
