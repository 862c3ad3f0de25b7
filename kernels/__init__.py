"""The hot loops: each has a NumPy twin here that says what it computes, and later a C or CUDA form."""
