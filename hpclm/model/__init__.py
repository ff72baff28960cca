"""The GPT core: a list of layers, each [t, B, C] -> [t, B, C]."""
