"""Widgets that one lesson needs: the attention matrix of notebook 08, the router dial of notebook 01."""
