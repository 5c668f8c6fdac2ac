"""A small valid scenario as text, and how to spoil it."""

from __future__ import annotations

from pathlib import Path

GOOD = """\
name: small
cluster:
  machine: DGX-A100
  nodes: 4
  network: ib_hdr
model:
  family: gpt
  layers: 24
  hidden: 2048
  heads: 16
  vocab: 50257
training:
  global_batch: 64
  micro_batch: 2
  seq_len: 2048
  precision: bf16
parallelism:
  tp: 4
  pp: 2
  dp: 4
"""


def write(folder: Path, text: str = GOOD, name: str = "small.yaml") -> Path:
    """The text as a file."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def spoiled(**lines: str) -> str:
    """``GOOD`` with whole lines replaced: ``spoiled(tp="  tp: 3")`` replaces the line whose key is ``tp``."""
    text = GOOD.splitlines()
    for key, line in lines.items():
        index = next(i for i, old in enumerate(text) if old.strip().startswith(f"{key}:"))
        text[index] = line
    return "\n".join(text) + "\n"
