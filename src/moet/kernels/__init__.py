"""What computes: the numpy reference, and kernels that equal it bit for bit."""
