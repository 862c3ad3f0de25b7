"""The learner schedule, the master that carries it out, and where ranks come from."""
