"""GGUF, the file of llama.cpp and of the programs that are built on it."""
