"""Check the Grafana dashboard against Grafana's own types: `python tools/board_types.py FOLDER`.

TypeScript reads the board's JSON as a constant of the type ``Dashboard`` of ``@grafana/schema``. Both packages are
fetched by npm into FOLDER, 26 MB, unless they are there. Needs node and npm, nothing of kvpolicy. Exit status 1 with
the compiler's errors where the board is not of that type, 2 where the packages cannot be had.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BOARD = Path(__file__).resolve().parent.parent / "integrations" / "grafana" / "dashboard.json"
PACKAGES = ("@grafana/schema@12", "typescript@5")
FLAGS = ("--noEmit", "--strict", "--skipLibCheck", "--module", "esnext", "--moduleResolution", "bundler")


def fetch(folder: Path) -> None:
    """Install the packages. Raises OSError or CalledProcessError where that fails."""
    if not compiler(folder).exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", ".", *PACKAGES]
        subprocess.run(command, cwd=folder, check=True)


def compiler(folder: Path) -> Path:
    return folder / "node_modules" / "typescript" / "bin" / "tsc"


def errors(folder: Path, board: str) -> str:
    """What the compiler says of the text of a board; empty if it is right."""
    source = folder / "board.ts"
    declared = 'import type { Dashboard } from "@grafana/schema";\nexport const board: Dashboard = '
    source.write_text(f"{declared}{board};\n")
    command = ["node", str(compiler(folder).resolve()), *FLAGS, "--target", "es2022", source.name]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout


def main() -> int:
    folder = Path(sys.argv[1])
    try:
        fetch(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"npm cannot bring {' and '.join(PACKAGES)}: {error}", file=sys.stderr)
        return 2
    found = errors(folder, BOARD.read_text())
    print(found or f"{BOARD.name} is a Dashboard of @grafana/schema")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
