"""Uses of a trained model: continue text, and measure how well it predicts other text."""
