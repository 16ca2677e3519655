"""Whether speculation pays, for notebook 17: the bytes of a step, a roofline with the step on it, and recorded rows."""
