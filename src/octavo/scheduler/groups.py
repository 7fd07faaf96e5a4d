"""Stage 2 of 7: requests of several samples. Before it: ``request``. After it: ``blocks``."""

from __future__ import annotations

from octavo.request import fork_id


class SampleGroup:
    """Which samples of a request have not ended, and who computes them.

    not forked   one Request computes the prompt for all        forked   a Request per sample; sample 0 keeps the first one's id
    """

    def __init__(self, request_id: int, num_samples: int, forked: bool) -> None:
        self.request_id = request_id
        self.live = set(range(num_samples))
        """Sample indices."""
        self.forked = forked

    def fork_of(self, sample_index: int) -> int:
        """Id of the Request that computes a sample."""
        return fork_id(self.request_id, sample_index) if self.forked else self.request_id
