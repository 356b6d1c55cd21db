"""Does one model descend from another? Weights are read, never loaded; every answer has a p-value."""
