"""What is measured on a GPU: the kernels against their peers and the bounds of the machine."""
