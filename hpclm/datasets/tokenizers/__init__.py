"""The kinds of tokenizers (data.tokenizer), a file for each library or format; they implement ``hpclm.data.tokenizers``."""
