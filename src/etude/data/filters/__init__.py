"""Filters: each keeps a document, changes it, or drops it with a reason."""
