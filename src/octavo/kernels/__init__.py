"""Array kernels behind one small contract, ``ops``: a NumPy reference that defines them and native code for CPUs."""
