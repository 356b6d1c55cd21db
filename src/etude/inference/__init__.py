"""Running a model: scoring text and writing it."""
