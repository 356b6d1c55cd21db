"""What an episode is worth beyond its tests: facts read from its trace and its diff, and the named parts a reward is made of."""
