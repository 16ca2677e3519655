"""When guessing ahead pays: plain decoding, every depth of every kind of draft, and adaptive depth, side by side."""
