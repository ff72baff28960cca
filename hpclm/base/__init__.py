"""Files, errors, the terminal and other basics. Every folder may import this one; it imports no other folder."""
