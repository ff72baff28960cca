"""What a trained model is used for: text that it continues, and how well it predicts other text."""
