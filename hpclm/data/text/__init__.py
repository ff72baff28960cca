"""hpclm preprocess: from text to datasets."""
