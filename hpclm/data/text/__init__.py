"""From text to tokens, whatever the text comes in: the parts of hpclm preprocess."""
