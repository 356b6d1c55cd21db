"""Asynchronous RL: episodes in sandboxes, groups, a policy that is trained while it samples."""
