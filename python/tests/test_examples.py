"""The programs of python/examples, on one rank and on two."""

from __future__ import annotations

import unittest

import ranks

ranks.need_torch()

EXAMPLES = sorted((ranks.HERE.parent / "examples").glob("*.py"))


class Examples(unittest.TestCase):
    def test_every_example_runs(self) -> None:
        self.assertTrue(EXAMPLES)
        for example in EXAMPLES:
            for count in (1, 2):
                for status, output in ranks.finish(ranks.start([str(example)], count)):
                    self.assertEqual(status, 0, f"{example.name}: {output}")


if __name__ == "__main__":
    unittest.main()
