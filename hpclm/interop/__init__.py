"""Convert weights between hpclm and other projects' formats. Downloads nothing and runs no code from a file."""
