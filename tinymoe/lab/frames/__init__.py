"""Frames: what a picture shows, computed from a recording alone.

Each room holds one view: `KINDS` (the events it reads), `moments(events)` (indices worth stopping at),
`frame(events, i)` (the state after event i, a dict that JSON can hold, integers and strings only),
`caption(frame)` (the same message in words) and `table(frame)` (the same numbers in rows, the first row is the header).
No plotly, no widgets, no torch: the terminal, the notebooks and the book draw the same frames.
"""
