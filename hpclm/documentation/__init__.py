"""The content of hpclm docs: pages, explanations of settings, and a search."""
