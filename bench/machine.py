"""What a result was measured on."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import jax


def describe_machine() -> dict[str, str | int]:
    """Processor, accelerator, versions and commit, for the head of a result file."""
    device = jax.devices()[0]
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "device": device.device_kind,
        "python": platform.python_version(),
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "commit": _ask("git", "rev-parse", "--short", "HEAD"),
    }


def find_driver() -> str:
    """The version of the GPU's driver."""
    return _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]


def _ask(*command: str) -> str:
    """What a command prints, if it is there and has something to say."""
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
