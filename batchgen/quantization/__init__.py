"""How linear layers store and multiply their weights: one file per scheme."""
