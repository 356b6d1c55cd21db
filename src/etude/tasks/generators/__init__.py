"""How broken trees are made of working ones; one way a file."""
