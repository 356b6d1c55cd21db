"""Text from repositories: source trees, their histories, and edits made from them."""
