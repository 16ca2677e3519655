"""Frames of what a step ran (schedule) and what it guessed ahead (drafts)."""
