"""Convert weights from and to other projects' formats. Nothing is downloaded, and no code in a file is run."""
