"""What was made from what, under which licence, with how much compute. Imports nothing from the layers above."""
