"""bfloat16 on a CPU is tried in a child process, so that a kernel that dies does not take the user's process along."""

import os
import sys

import pytest

from mgtta._lib import cpu
from mgtta._lib.cpu import check_bfloat16


def child(code):
    return [sys.executable, "-S", "-c", code]


def test_bfloat16_is_accepted_where_its_kernels_run():
    check_bfloat16()


def test_bfloat16_is_refused_where_its_kernels_kill_the_process():
    dies = child("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    with pytest.raises(RuntimeError, match=r"do not work on this CPU.* killed by SIGILL \(Illegal instr.*\)") as info:
        check_bfloat16(dies)
    assert 'precision="fp32"' in str(info.value)
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in str(info.value)


def test_bfloat16_is_refused_where_its_kernels_raise():
    raises = child("raise RuntimeError('could not create a primitive')")
    with pytest.raises(RuntimeError, match=r"exit code 1 \(RuntimeError: could not create a primitive\)"):
        check_bfloat16(raises)


def test_bfloat16_is_refused_where_its_kernels_hang(monkeypatch):
    monkeypatch.setattr(cpu, "TIMEOUT_SECONDS", 0.2)
    with pytest.raises(RuntimeError, match="did not end within"):
        check_bfloat16(child("import time; time.sleep(60)"))


@pytest.mark.parametrize("code", [0, 1])
def test_bfloat16_is_tried_once_per_process(tmp_path, code):
    file = tmp_path / "tries"
    command = child(f"open({str(file)!r}, 'a').write('x'); raise SystemExit({code})")
    for _ in range(3):
        if code == 0:
            check_bfloat16(command)
        else:
            with pytest.raises(RuntimeError, match="exit code 1"):
                check_bfloat16(command)
    assert file.read_text() == "x"


def test_tests_keep_torch_away_from_amx():
    assert "ONEDNN_MAX_CPU_ISA" in os.environ  # see conftest.py
