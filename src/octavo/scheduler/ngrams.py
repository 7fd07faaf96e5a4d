"""Stage 2 of 7: where the last tokens of a request occurred before. Before it: ``request``. After it: ``speculation``.

A chain links the places where the same ``shortest`` tokens stand, latest first, as the hash chains of LZ77 compressors do:

    tokens     a b c d x a b e y a b      shortest = 2: the pair "a b" stands at 9, 5 and 0
               ^         ^       ^
               0 <------ 5 <---- 9        _earlier[9] = 5, _earlier[5] = 0, _earlier[0] = -1
"""

from __future__ import annotations

from array import array

MAX_TRIED = 8
"""Most earlier places that are compared."""


class NgramIndex:
    """All runs of ``shortest`` tokens in one request's tokens, which only grow."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._latest: dict[bytes, int] = {}
        """Where each run stands last, by its tokens' bytes."""
        self._earlier = array("i")
        """By position: where the run that begins there stands before that, or -1."""

    def num_missing(self, token_ids: array[int]) -> int:
        """Runs that have not been taken in."""
        return max(0, len(token_ids) - self._shortest + 1 - len(self._earlier))

    def extend(self, token_ids: array[int], most: int) -> None:
        """Take in up to ``most`` runs of the tokens that are new."""
        first, size = len(self._earlier), token_ids.itemsize
        run = self._shortest * size
        data = token_ids[first : first + most + self._shortest - 1].tobytes()
        latest, earlier = self._latest, self._earlier
        for number, start in enumerate(range(0, len(data) - run + size, size), first):
            key = data[start : start + run]
            earlier.append(latest.get(key, -1))
            latest[key] = number

    def find(self, token_ids: array[int]) -> int:
        """Where the tokens go on after the earlier place that ends most like they do, or -1 without one.

        Of the latest ``MAX_TRIED`` places with the same ``shortest`` last tokens it is the one with the most last tokens in
        common, of which ``longest`` count; of those that are alike the latest. All tokens must have been taken in.
        """
        if not self._earlier:
            return -1
        found, most = -1, 0
        place = self._earlier[-1]
        for _ in range(MAX_TRIED):
            if place < 0:
                break
            common = self._num_common(token_ids, place)
            if common > most:
                found, most = place + self._shortest, common
            if common == self._longest:
                break
            place = self._earlier[place]
        return found

    def _num_common(self, token_ids: array[int], place: int) -> int:
        """Last tokens in common with those that end with the run at ``place``, ``longest`` at most."""
        shortest = self._shortest
        here = len(token_ids) - shortest
        more = min(self._longest - shortest, place)
        return shortest + next((n for n in range(more) if token_ids[place - 1 - n] != token_ids[here - 1 - n]), more)
