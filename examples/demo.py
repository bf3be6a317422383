"""`make demo`: files to tokens to batches to a model. The run is killed twice and resumes on other numbers of ranks."""

import argparse
import contextlib
import importlib.util
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from demo_parts.making import TOKENIZER, make_data
from demo_parts.running import Run, compare, run_all
from rich.console import Console

console = Console(highlight=False, soft_wrap=True)


def title(text: str) -> None:
    console.print(f"\n[bold]{text}[/]")


def penstock(*words: str) -> None:
    """Print a command as a user would type it, and run it."""
    console.print(f"[dim]$ penstock {' '.join(words)}[/]".replace(TOKENIZER, "tokenizer"))
    sys.stdout.flush()
    subprocess.run([sys.executable, "-m", "penstock", *words], check=True)


def main(documents: int, steps: int, worlds: list[int]) -> None:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        make_data(Path(), documents)
        title(f"1. Prepare {documents:,} documents and {documents // 16:,} chats, once")
        penstock("prepare", "text.jsonl", "--tokenizer", TOKENIZER, "--out", "text.store")
        penstock("prepare", "chats.jsonl", "--tokenizer", TOKENIZER, "--template", "chatml", "--out", "chats.store")
        title("2. What an epoch comes to, to the last token, before anything is trained")
        penstock("plan", "train.yaml", "--set", f"world_size={worlds[0]}", "--set", f"batch_size={8 // worlds[0]}")
        title("3. The loader alone")
        penstock("bench", "train.yaml", "--seconds", "1")
        if importlib.util.find_spec("torch") is None:
            title("4. Stop and resume the loader alone; with torch installed, a model is trained here")
            penstock("verify-resume", "train.yaml")
            return
        title(f"4. Train {steps} steps; kill -9, and go on with another number of ranks")
        runs = [Run(number, world, steps * number // len(worlds)) for number, world in enumerate(worlds, 1)]
        run_all(runs, steps, Path(), console)
        title("5. Compare")
        console.print(f"{compare(runs, steps, 'train.yaml')}\n\nall of it took {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 1], help="numbers of ranks, one run each")
    given = parser.parse_args()
    main(given.documents, given.steps, given.worlds)
