"""The programs of python/examples, on one rank and on two."""

from __future__ import annotations

import os
import subprocess
import sys
import unittest
from pathlib import Path

import ranks

ranks.need_torch()

# What `cargo test` leaves in the workspace, or another.
BINARY = Path(os.environ.get("FERROSPEED_BINARY", ranks.HERE.parent.parent / "target" / "debug" / "ferrospeed"))
EXAMPLES = sorted((ranks.HERE.parent / "examples").glob("*.py"))


class Examples(unittest.TestCase):
    def test_every_example_runs(self) -> None:
        self.assertTrue(EXAMPLES)
        for example in EXAMPLES:
            for count in (1, 2):
                for status, output in ranks.finish(ranks.start([str(example)], count)):
                    self.assertEqual(status, 0, f"{example.name}: {output}")

    @unittest.skipUnless(BINARY.exists(), f"no {BINARY}: cargo build -p ferrospeed-cli")
    def test_our_launcher_starts_a_script_on_two_ranks(self) -> None:
        command = [str(BINARY), "launch", "-n", "2", "--python", "--", str(EXAMPLES[0])]
        env = dict(os.environ, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        ended = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=ranks.DEADLINE_SECONDS)
        self.assertEqual(ended.returncode, 0, ended.stdout)
        self.assertIn("on 2 ranks", ended.stdout)


if __name__ == "__main__":
    unittest.main()
