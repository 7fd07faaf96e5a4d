"""The OpenAI-compatible server: routes and translation, around an ``AsyncEngine``."""
