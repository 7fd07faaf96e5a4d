"""Who may import whom: the arrows of docs/architecture.md, enforced."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "octavo"
ARRAYS = {"numpy", "ml_dtypes", "torch", "triton", "scipy"}

# package or module -> what of ours it may import; the longest match rules
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "request": {"config", "errors"},
    "splitmix": set(),
    "user_cache": set(),
    "cli_options": {"llm"},
    "limits": {"request", "config", "errors", "splitmix"},
    "blocks": {"errors", "blocks"},
    "scheduler": {"request", "blocks", "config", "errors", "scheduler"},
    "engine.core": {"scheduler", "limits", "request", "blocks", "config", "errors", "engine.events", "engine.metrics"},
    "engine.events": {"scheduler", "request", "blocks", "config", "errors"},
    "engine.metrics": {"scheduler", "request", "blocks", "config", "errors", "engine.events"},
    "engine.memory": {"blocks", "config", "errors", "models.spec"},
    "engine.outputs": {"engine.core", "text", "request", "errors"},
    "engine.text_engine": {"engine.core", "engine.outputs", "text", "limits", "request", "errors"},
    "engine.async_engine": {"engine.core", "engine.outputs", "engine.text_engine", "text", "request", "errors"},
    "engine.build": {"engine", "scheduler", "blocks", "kernels", "models", "runner", "text", "limits", "request", "config", "errors"},
    "kernels": {"kernels", "errors", "splitmix", "_native"},
    "models.spec": {"errors"},
    "models.architectures": {"errors", "models.spec"},
    "models.weight_formats": {"errors", "models.spec"},
    "models": {"models", "kernels", "user_cache", "errors"},
    "runner": {"runner", "models", "kernels", "scheduler.step", "request", "config", "errors"},
    "text": {"text", "errors"},
    "server": {"server", "cli_options", "engine", "text", "request", "config", "errors"},
    "planner": {
        "planner",
        "engine.core",
        "engine.events",
        "engine.memory",
        "scheduler",
        "blocks",
        "models.spec",
        "models.architectures",
        "models.weight_formats",
        "request",
        "limits",
        "user_cache",
        "config",
        "errors",
    },
    "llm": {"engine", "text", "request", "config", "errors"},
}
NO_ARRAYS = ("errors", "config", "request", "splitmix", "user_cache", "limits", "blocks", "scheduler", "engine.core", "engine.events", "engine.metrics",
             "engine.memory", "models.spec", "models.architectures", "models.weight_formats", "text", "planner")  # fmt: skip
MODULES = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in ROOT.rglob("*.py")}


def imports_of(path: Path) -> set[str]:
    """Modules named in import statements that run, not those for type checking alone."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.dump(branch.test)
        for node in ast.walk(branch)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" if node.module == "octavo" else str(node.module) for alias in node.names}
    return found


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def rule_for(module: str) -> set[str] | None:
    return ALLOWED.get(max((p for p in ALLOWED if within(module, p)), key=len, default=""))


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_follow_the_arrows(module: str) -> None:
    allowed = rule_for(module)
    found = imports_of(MODULES[module])
    if allowed is not None:
        ours = {name.removeprefix("octavo.") for name in found if within(name, "octavo") and name != "octavo"}
        wrong = {name for name in ours if not any(within(name, prefix) for prefix in allowed)}
        assert not wrong, f"{module} may not import {sorted(wrong)}"
    if any(within(module, prefix) for prefix in NO_ARRAYS):
        assert not {name.split(".")[0] for name in found} & ARRAYS, f"{module} is behind the array wall"
    if not within(module, "kernels.gpu"):
        assert not {name.split(".")[0] for name in found} & {"torch", "triton"}, f"{module} imports torch"


def loaded_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(' '.join(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "octavo",
        "octavo.engine.core",
        "octavo.scheduler.scheduler",
        "octavo.models.architectures",
        "octavo.cli",
        "octavo.planner.plan_report",
        "octavo.planner.studies",
    ],
)
def test_light_modules_load_no_arrays(module: str) -> None:
    assert not {name.split(".")[0] for name in loaded_after(f"import {module}")} & (ARRAYS | {"tokenizers", "jinja2"})


def test_public_names_are_complete_and_exist() -> None:
    import octavo

    assert sorted(octavo.__all__) == octavo.__all__ or set(octavo.__all__) == {*octavo._HOME, "__version__"}
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
    with pytest.raises(AttributeError):
        _ = octavo.nothing


def test_stage_files_say_where_they_stand() -> None:
    stages = {
        "request": 1,
        "scheduler.scheduler": 2,
        "blocks.block_manager": 3,
        "blocks.block_table": 4,
        "models.decoder": 6,
        "runner.sampler": 7,
    }
    for module, stage in stages.items():
        assert MODULES[module].read_text().startswith(f'"""Stage {stage} of 7'), module
