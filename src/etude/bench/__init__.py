"""Measuring models: which base suits your code, and how well an agent does."""
