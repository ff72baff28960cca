"""What a run will need and how fast it will be, by arithmetic alone: no file here loads torch."""
