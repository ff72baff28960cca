"""The ranks of a run among themselves: who they are, how they meet, what they agree on, how they end together."""
