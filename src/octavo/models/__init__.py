"""What a model is: its spec, its files, its weights, and the one decoder written over the kernels."""
