"""Files, errors, the terminal and other basics. Every folder may import this one, which imports none of them."""
