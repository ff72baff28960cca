"""The kinds of tokenizers (data.tokenizer), one file for each library or format; they implement ``hpclm.data.tokenizers``."""
