"""Widgets that one lesson needs: the attention matrix of notebook 08, the router dial of 01, the tile map of 07, the
grouping of 05, the touch map of 06 and the watcher that feeds it."""
