"""Runs plans: rows and arrays of the running requests, the KV cache, the recorded step, the sampler."""
