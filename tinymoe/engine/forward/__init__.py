"""The forward pass: chunks become flat tensors, and those run, one kernel after another or as a captured graph."""
