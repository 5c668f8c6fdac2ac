"""``python -m simtrain``."""

from __future__ import annotations

from simtrain.cli import main

if __name__ == "__main__":
    main()
