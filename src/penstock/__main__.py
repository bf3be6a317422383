"""`python -m penstock` is `penstock`."""

from __future__ import annotations

from penstock.cli.main import app

if __name__ == "__main__":
    app(prog_name="penstock")
