"""How processes start, what they run on, and how they leave."""
