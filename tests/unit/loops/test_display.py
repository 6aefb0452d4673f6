import os
import subprocess
import sys

WITHOUT_A_READER = """
from trainer.loops.display import Display
with Display(2, 0, "SFT") as display:
    display.note("lost")
    display.step(1, {"loss/mean": 1.0})
print("also lost", flush=True)
"""


def test_a_reader_that_left_does_not_end_the_run():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", WITHOUT_A_READER]
    run = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert run.returncode == 0
    assert run.stderr.count("nobody reads standard output any more") == 1
