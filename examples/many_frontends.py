"""One core for many processes: a daemon has the model, and each program that connects needs few resources."""

import subprocess
import sys
import tempfile
from pathlib import Path

from mainspring import LLM, SamplingParams

program = """
import sys
from mainspring import LLM, SamplingParams
with LLM(connect=sys.argv[1]) as llm:
    (output,) = llm.generate(f"Tell me about the number {sys.argv[2]}.", SamplingParams(seed=1), use_tqdm=False)
    print(f"program {sys.argv[2]}: {output.outputs[0].text.strip()!r}", flush=True)
"""

with tempfile.TemporaryDirectory() as folder:
    address = f"ipc://{Path(folder, 'core')}"
    daemon = subprocess.Popen([Path(sys.executable).with_name("mainspring"), "daemon", "--listen", address])
    try:
        with LLM(connect=address) as llm:  # waits while the daemon loads
            others = [subprocess.Popen([sys.executable, "-c", program, address, str(number)]) for number in range(3)]
            llm.generate(["Count to ten."] * 4, SamplingParams(max_tokens=30), use_tqdm=False)
            for other in others:
                other.wait()
            print("all three, and this one, were served by the core of one daemon")
    finally:
        daemon.terminate()
        daemon.wait()
