"""Figures of one engine, counted from its events and its steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from octavo.blocks import BlockManager, BlockStats
from octavo.engine.events import Admitted, Event, Finished, Preempted
from octavo.scheduler.step import StepPlan


@dataclass(slots=True)
class Metrics:
    """Counters since the engine began. ``hear`` subscribes to the event log, ``observe_step`` is called once a step."""

    num_steps: int = 0
    num_tokens_computed: int = 0
    """Tokens that went through the model, again after preemptions included, and drafts."""
    num_tokens_generated: int = 0
    num_drafts: int = 0
    """Drafts that went through the model."""
    num_drafts_accepted: int = 0
    """Of these, the ones that became output."""
    num_tokens_lost: int = 0
    """Computed tokens given up by preemptions."""
    num_preemptions: int = 0
    num_resumptions: int = 0
    max_num_running: int = 0
    max_used_blocks: int = 0
    max_internal_slots: int = 0
    """The most unused slots that one request ever held."""
    finished: Counter[str] = field(default_factory=Counter)
    """Samples that ended, by reason."""
    _internal_slots: int = 0
    _used_slots: int = 0
    _used_blocks: int = 0
    _saved_blocks: int = 0

    def hear(self, event: Event) -> None:
        """Count one event."""
        if isinstance(event, Preempted):
            self.num_preemptions += event.was_running
            self.num_tokens_lost += event.num_lost
        elif isinstance(event, Admitted):
            self.num_resumptions += event.resumed
        elif isinstance(event, Finished):
            self.finished[event.reason.value] += 1

    def observe_step(self, plan: StepPlan, num_running: int, blocks: BlockStats) -> None:
        """Count a step that is about to run, with its blocks reserved."""
        self.num_steps += 1
        self.num_tokens_computed += plan.num_tokens
        self.num_drafts += sum(plan.num_drafts)
        self.max_num_running = max(self.max_num_running, num_running)
        self.max_used_blocks = max(self.max_used_blocks, blocks.used)
        self.max_internal_slots = max(self.max_internal_slots, blocks.max_internal_slots)
        self._internal_slots += blocks.internal_slots
        self._used_slots += blocks.used_slots
        self._used_blocks += blocks.used
        self._saved_blocks += blocks.saved

    def report(self, num_running: int, num_waiting: int, manager: BlockManager) -> dict[str, Any]:
        """All figures as plain values.

        ``waste`` by kind: ``internal`` is the share of the used slots that held no token, averaged over all steps (each
        step counts by its used slots), ``internal_now`` the same at this moment; ``recomputed`` is the share of
        computed tokens that preemptions gave up. ``sharing``: ``saved`` is the share of blocks that would have been needed
        without sharing and were not, averaged over all steps in the same way, from the two sums of blocks over steps; ``saved_now`` the same at this moment.
        """
        blocks, shared = manager.stats(), manager.sharing
        return {
            "num_running": num_running,
            "num_waiting": num_waiting,
            "max_num_running": self.max_num_running,
            "num_preemptions": self.num_preemptions,
            "num_resumptions": self.num_resumptions,
            "num_finished": dict(self.finished),
            "num_steps": self.num_steps,
            "num_tokens_computed": self.num_tokens_computed,
            "num_tokens_generated": self.num_tokens_generated,
            "blocks": {
                "total": blocks.total,
                "free": blocks.free,
                "cached": blocks.cached,
                "used": blocks.used,
                "shared": blocks.shared,
                "max_used": self.max_used_blocks,
            },
            "prefix_cache": {
                "queries": shared.num_queries,
                "hits": shared.num_hits,
                "misses": shared.num_queries - shared.num_hits,
                "tokens_asked": shared.num_tokens_asked,
                "tokens_saved": shared.num_tokens_saved,
                "blocks_shared": shared.num_blocks_shared,
                "bytes_shared": shared.num_blocks_shared * manager.block_bytes,
                "copies": shared.num_prefix_copies,
                "evictions": manager.num_evictions,
            },
            "sharing": {
                "forks": shared.num_forks,
                "copies": shared.num_fork_copies,
                "block_steps_used": self._used_blocks,
                "block_steps_saved": self._saved_blocks,
                "saved": self._saved_blocks / max(1, self._saved_blocks + self._used_blocks),
                "saved_now": blocks.saved / max(1, blocks.saved + blocks.used),
                "bytes_saved_now": blocks.saved * manager.block_bytes,
            },
            "speculation": {
                "drafted": self.num_drafts,
                "accepted": self.num_drafts_accepted,
                "acceptance": self.num_drafts_accepted / max(1, self.num_drafts),
            },
            "waste": {
                "internal": self._internal_slots / max(1, self._used_slots),
                "internal_now": blocks.internal_slots / max(1, blocks.used_slots),
                "max_slots_per_request": self.max_internal_slots,
                "recomputed": self.num_tokens_lost / max(1, self.num_tokens_computed),
            },
        }
