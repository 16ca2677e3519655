"""The ways through the experts on a GPU: what each costs, which routes really came by, and how well one is chosen."""
