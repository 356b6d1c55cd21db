"""Semantic search in a source tree: chunks of code, ranked by words and by a sentence embedder."""
