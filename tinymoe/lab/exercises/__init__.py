"""Exercises that check themselves: each has a judge that knows the answer by another way, and names a counter-example."""
