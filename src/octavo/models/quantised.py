"""A checkpoint with some of its matrices quantised: a step from tensors to tensors, before anything is packed.

The result is kept on disk (``quantised_cache.py``), so that the next start only maps it. Where that cannot be done, each matrix is
quantised when it is asked for. The blocks are the same either way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from octavo.kernels.ops import Backend, TensorSource
from octavo.models.weights import Checkpoint

Progress = Callable[[int, int], None]
"""Told (matrices quantised, matrices in all)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Quantised:
    """A checkpoint whose matrices have the wanted formats."""

    checkpoint: Checkpoint
    cache: str = ""
    """Where the quantised weights are kept, or why they are not, for people; empty where there are none."""


def quantize(checkpoint: Checkpoint, wanted: Mapping[str, str], backend: Backend, progress: Progress) -> Quantised:
    """Bring matrices to formats ("Q8_0", "Q4_1"); ``wanted``: canonical name -> format.

    Raises ``ModelLoadError`` where a weight is not finite. A cache that cannot be written is no error.
    """
    if not wanted:
        return Quantised(checkpoint)
    try:
        return _cached(checkpoint, wanted, backend, progress)
    except OSError as error:
        on_demand = _override(checkpoint, wanted, lambda name: _one(checkpoint, name, wanted[name], backend), lambda _: None)
        return Quantised(on_demand, f"not kept for the next start: {error}")


def _cached(checkpoint: Checkpoint, wanted: Mapping[str, str], backend: Backend, progress: Progress) -> Quantised:
    from octavo.models.quantised_cache import CacheEntry  # and with it what most starts do not need

    shapes = checkpoint.spec.matrix_shapes()
    entry = CacheEntry.of(checkpoint.path, [(name, shapes[name], format) for name, format in wanted.items()])
    file, made = entry.open(), "found in"
    if file is None:
        entry.write(_all(checkpoint, wanted, backend, progress))
        file, made = entry.open(), "kept in"
    if file is None:
        raise OSError(f"{entry.path} was not what had been written")
    return Quantised(
        _override(checkpoint, wanted, file.source, file.release), f"{made} {entry.path} ({entry.path.stat().st_size / 2**20:.1f} MiB)"
    )


def _all(checkpoint: Checkpoint, wanted: Mapping[str, str], backend: Backend, progress: Progress) -> Iterator[TensorSource]:
    for done, (name, format) in enumerate(wanted.items(), 1):
        yield _one(checkpoint, name, format, backend)
        progress(done, len(wanted))


def _one(checkpoint: Checkpoint, name: str, format: str, backend: Backend) -> TensorSource:
    source = checkpoint.tensor(name)
    quantised = dataclasses.replace(backend.quantize(source, format), name=name)
    checkpoint.release(source)
    return quantised


def _override(
    checkpoint: Checkpoint, names: Mapping[str, str], find: Callable[[str], TensorSource], release: Callable[[TensorSource], None]
) -> Checkpoint:
    """The checkpoint, with the tensors of some names from elsewhere."""
    return dataclasses.replace(
        checkpoint,
        _find=lambda name: find(name) if name in names else checkpoint.tensor(name),
        _release=lambda source: release(source) if source.name in names else checkpoint.release(source),
    )
