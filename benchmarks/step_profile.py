"""Files and functions that one plain step of each face enters, as a Markdown table.

    python benchmarks/step_profile.py
    python benchmarks/step_profile.py --face BaseTrainer --calls    # also every call, in order

``tests/step_profile_kit.py`` has the definition; ``tests/unit/test_step_cost.py`` holds the numbers as upper bounds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from step_profile_kit import FACES, profile_of, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--face", choices=list(FACES), action="append", help="only this face; may be repeated")
    parser.add_argument("--calls", action="store_true", help="list every call")
    asked = parser.parse_args()
    faces = asked.face or list(FACES)
    print(table(faces))
    for face in faces if asked.calls else ():
        profile = profile_of(face)
        print(f"\n{face}:")
        for file, code in zip(profile.visited, profile.codes, strict=True):
            print(f"  {file}:{code.co_firstlineno} {code.co_name}")


if __name__ == "__main__":
    main()
