"""Hugging Face's folders: config.json, safetensors, tokenizer."""
