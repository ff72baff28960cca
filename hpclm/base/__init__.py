"""Files, errors, the terminal, and what else any other folder may use; it uses none of them."""
