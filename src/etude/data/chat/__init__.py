"""Conversations for supervised fine-tuning: read or made from code, rendered token by token, packed into rows."""
