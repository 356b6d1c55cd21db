"""From documents to what a model reads: files joined by repository, middles moved to the end, text turned into tokens."""
