"""Stage 2 of 7: who computes how many tokens in the next step. Before it: ``request``. After it: ``blocks``."""
