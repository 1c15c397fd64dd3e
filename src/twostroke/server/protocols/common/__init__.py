"""Parts that several protocols share: fields, usage, tools, lists, cache control."""
