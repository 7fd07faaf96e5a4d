"""Plans and simulations: what fits, what is wasted, which block size. The engine's own scheduler under a virtual clock."""
