"""Octavo beside other engines, on one machine in one run: ``make bench-peers ARGS="--repeats 1 --workloads ab"``.

Each engine has its own environment under ``--folder``, made once. A round takes the precisions one after another and within each the
engines in turns, A B C A B C; each measurement is a fresh process. The machine's limits are measured before every round. Results are
written after each process, so that a run that is cut short keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import SHARED, Limits
from benchmarks.peers.checkpoints import checkpoint
from benchmarks.peers.engines.base import Engine
from benchmarks.peers.engines.llama_cpp import LlamaCpp
from benchmarks.peers.engines.octavo import ROOT, Octavo
from benchmarks.peers.engines.openvino import OpenVino
from benchmarks.peers.engines.vllm import Vllm
from benchmarks.peers.process import execute, output_of
from benchmarks.peers.report import COLUMNS, load_workloads, markdown
from benchmarks.peers.results import Record, failures
from benchmarks.peers.workshop import CannotPrepare, Workshop
from octavo.bench.kernels import processor

ENGINES: dict[str, Callable[[Workshop], Engine]] = {
    "octavo": lambda shop: Octavo(shop, "Octavo"),
    "octavo-kv8": lambda shop: Octavo(shop, "Octavo, int8 KV", kv_dtype="int8"),
    "openvino": OpenVino,
    "vllm": Vllm,
    "llama.cpp": LlamaCpp,
}
NOT_IN_4_BIT = "e"


class Results:
    """The document that the tables are made from, kept on disk as it grows."""

    def __init__(self, folder: Path, precisions: list[str], repeats: int) -> None:
        self._folder = folder
        self.document: dict[str, Any] = {
            "machine": f"{processor()}, {os.cpu_count()} cores, {platform.system()}",
            "date": time.strftime("%Y-%m-%d"),
            "precisions": precisions,
            "repeats": repeats,
            "limits": [],
            "engines": [],
            "records": [],
        }

    def save(self) -> str:
        """Write results.json and results.md; returns the latter's text."""
        (self._folder / "results.json").write_text(json.dumps(self.document, indent=1))
        text = markdown(self.document, load_workloads())
        (self._folder / "results.md").write_text(text)
        return text


def prepared(engines: list[Engine], precisions: list[str], workloads: str, results: Results) -> Iterator[tuple[str, Engine]]:
    """(precision, engine) in the order of a round, for all that could be installed; the others become rows that say why."""
    ready = [engine for engine in engines if _installed(engine, results)]
    for precision in precisions:
        for engine in ready:
            if precision not in engine.precisions:
                continue
            try:
                engine.prepare(precision, workloads)
                yield precision, engine
            except CannotPrepare as error:
                results.document["records"].append({"engine": engine.name, "precision": precision, "workload": "", "why": str(error)})


def _installed(engine: Engine, results: Results) -> bool:
    about: dict[str, Any] = {"name": engine.name, "settings": engine.settings}
    results.document["engines"].append(about)
    try:
        engine.install()
        about |= {"version": engine.version(), "installed_mib": engine.installed_mib()}
    except CannotPrepare as error:
        failed = {"engine": engine.name, "workload": "", "why": str(error)}
        results.document["records"] += [failed | {"precision": p} for p in engine.precisions if p in results.document["precisions"]]
        return False
    return True


def letters_for(engine: Engine, precision: str, workloads: str, first_round: bool) -> str:
    """The workloads of one turn."""
    left_out = ("" if first_round else engine.once) + (NOT_IN_4_BIT if precision == "int4" else "")
    return "".join(w for w in workloads if w in engine.workloads and w not in left_out)


def measure(turns: list[tuple[str, Engine]], workloads: str, repeats: int, shop: Workshop, results: Results) -> None:
    """All rounds. Fills ``results`` and says how far it is."""
    limits, start, total = Limits(), time.perf_counter(), repeats * len(turns)
    for number in range(repeats):
        results.document["limits"].append(limits.measure())
        print(f"round {number + 1} of {repeats}: {results.document['limits'][-1]}", flush=True)
        for done, (precision, engine) in enumerate(turns, number * len(turns) + 1):
            take_turn(engine, precision, letters_for(engine, precision, workloads, number == 0), number, shop, results)
            minutes = (time.perf_counter() - start) / 60
            print(f"  {done} of {total} turns, {minutes:.1f} min, at this pace {minutes * (total - done) / done:.0f} more", flush=True)


def take_turn(engine: Engine, precision: str, letters: str, number: int, shop: Workshop, results: Results) -> None:
    for run in engine.runs(precision, letters):
        records = execute(run, shop.logs / f"{engine.name}-{precision}-{run.workloads}-{number}.log")
        results.document["records"] += [record | {"round": number} for record in records]
        results.save()
        print(f"  {engine.name} {precision}: {brief(records)}", flush=True)


def brief(records: list[Record]) -> str:
    """One line on what a process found."""
    found = [f"{r['workload'].upper()} " + " ".join(f"{k}={v:g}" for k, v in r["metrics"].items()) for r in records if "metrics" in r]
    return "; ".join(found + [f"{letters} failed: {why}" for (*_, why), letters in failures(records).items()])


def compare_schedulers(vllm: Vllm, shop: Workshop) -> dict[str, Any] | None:
    """A step of both schedulers in vLLM's environment; None where that fails."""
    argv = [str(vllm.environment / "bin" / "python"), str(Path(__file__).with_name("scheduler_vllm.py")), str(checkpoint(shop, "smollm2"))]
    env = {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    return next(output_of(argv, env, shop.logs / "scheduler.log"), None)


def some_of(legal: Iterable[str]) -> Callable[[str], list[str]]:
    """Parses names with commas between; others than the legal ones are refused."""

    def parse(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in legal]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not known; choose some of {','.join(legal)}")
        return text.split(",")

    return parse


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=some_of(ENGINES), default=",".join(ENGINES), help=f"some of {','.join(ENGINES)}")
    parser.add_argument("--workloads", default="abcdeqs", help="a to e; q: A at 0.5B; s: time per step beside vLLM's scheduler")
    parser.add_argument("--precisions", type=some_of(COLUMNS), default=",".join(COLUMNS), help=f"some of {','.join(COLUMNS)}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("build/peers"), help="where environments, models, logs and results are kept")
    parser.add_argument("--prepare", action="store_true", help="install and make models only")
    return parser.parse_args()


def require_surroundings() -> None:
    if not SHARED.is_dir():
        sys.exit(
            f"bench-peers: {SHARED} is absent; workloads, runners and limits.cpp lie there: set OCTAVO_SHARED to the folder that holds bench/"
        )
    if absent := [tool for tool in ("bash", "bc", "curl", "g++") if shutil.which(tool) is None]:
        sys.exit(f"bench-peers: {', '.join(absent)} must be installed; the runners and limits.cpp need them")


def main() -> None:
    options = arguments()
    require_surroundings()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench-peers: stopped"))  # an exit that also ends what is being measured
    shop = Workshop(options.folder.resolve())
    results = Results(shop.folder, options.precisions, options.repeats)
    turns = list(prepared([ENGINES[name](shop) for name in options.peers], options.precisions, options.workloads, results))
    if options.prepare:
        return
    measure(turns, options.workloads, options.repeats, shop, results)
    installed = [engine for _, engine in turns if isinstance(engine, Vllm)]
    if "s" in options.workloads and installed and (found := compare_schedulers(installed[0], shop)) is not None:
        results.document["scheduler"] = found
    print(results.save(), end="")


if __name__ == "__main__":
    main()
