import os
import subprocess
import sys

SAYS_MUCH = """
from trainer.loops.display import Display
with Display(2, 0, "SFT") as display:
    display.note("lost")
    display.step(1, {"loss/mean": 1.0})
print("also lost", flush=True)
"""


def test_a_reader_that_left_does_not_end_the_run():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", SAYS_MUCH]
    run = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert run.returncode == 0
    assert run.stderr.count("nobody reads standard output any more") == 1


def test_a_full_disk_behind_the_output_does_not_end_the_run():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", SAYS_MUCH]
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert run.returncode == 0
    assert run.stderr.count("standard output cannot be written ([Errno 28]") == 1
