"""The loop around scheduler and runner, and what clients see of it: updates, events, figures."""
