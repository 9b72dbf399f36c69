"""The check of kernels on a GPU, where there is none."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu_check", "--out", tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    printed = done.stdout + done.stderr
    assert printed.count("\n") == 1 and "no GPU" in printed
