"""Every exception Octavo raises on purpose, with the HTTP status a server answers with.

    OctavoError                          500
    ├── InvalidRequestError (ValueError) 400   the request itself is wrong
    │   └── ContextLengthError           400   prompt or max_tokens cannot fit
    ├── ConfigError (ValueError)         500   a setting is wrong, found at start
    │   └── MemoryConfigError            500   the model or its cache does not fit
    ├── ModelLoadError                   500   a checkpoint is missing, damaged or not supported
    ├── EngineError                      500   the engine failed while a request was running
    ├── EngineClosedError                503   the engine has been shut down
    ├── QueueFullError                   429   too many requests wait
    └── DeadlineError                    504   a request took longer than the server allows

Messages say what was wrong, what is legal and what to do. ``assert`` is kept for our own bugs.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of all of Octavo's exceptions."""

    http_status = 500
    code = "internal_error"


class InvalidRequestError(OctavoError, ValueError):
    """A request that can never be run as it stands."""

    http_status = 400
    code = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """A prompt, or a prompt with its ``max_tokens``, longer than the model or the cache allows."""

    code = "context_length_exceeded"


class ConfigError(OctavoError, ValueError):
    """A setting that is not legal, or settings that contradict each other."""

    code = "config_error"


class MemoryConfigError(ConfigError):
    """Weights or KV cache do not fit the memory; the message names the number to change, and to what."""

    code = "out_of_memory"


class ModelLoadError(OctavoError):
    """A checkpoint that cannot be found, read or run."""

    code = "model_load_error"


class EngineError(OctavoError):
    """A failure inside the engine while requests were running."""

    code = "engine_error"


class EngineClosedError(OctavoError):
    """The engine has been shut down and takes no more requests."""

    http_status = 503
    code = "engine_closed"


class QueueFullError(OctavoError):
    """Too many requests wait already; try again after ``retry_after`` seconds."""

    http_status = 429
    code = "queue_full"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineError(OctavoError):
    """A request was given up because it took longer than the server allows."""

    http_status = 504
    code = "request_timeout"
