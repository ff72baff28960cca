"""GGUF, the file format of llama.cpp and the programs built on it."""
