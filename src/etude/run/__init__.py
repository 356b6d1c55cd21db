"""Running a recipe: folders, locks, reuse, interruption, records."""
