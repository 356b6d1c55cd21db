"""What each stage and run shows to people: tables, plots, pages, the ending of a run."""
