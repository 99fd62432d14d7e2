"""Options that the steps of ``saccade eval`` share."""

from __future__ import annotations

import typer

OUT = typer.Option("--out", "-o", help="Folder to write to.")
SIZE = typer.Option("--suite", "--size", help="smoke, core or full.")
TASK = typer.Option(
    "--task",
    "-t",
    help="A task (natural:facts, ruler:vt) or all of a source (ruler:all). Where none is given: natural:all, ruler:all "
    "and long:all; of the built-in models facts:all (retriever), or the suite (reference), whose tasks have no source.",
)
LENGTH = typer.Option("--length", help="Length in tokens; may be given several times.")
SAMPLES = typer.Option("--samples", help="Samples of each task and length.")
SEED = typer.Option("--seed", help="Seed of the samples.")
POLICY = typer.Option("--policy", "-p", help="A policy; may be given several times.")
PROTOCOL = typer.Option("--protocol", help="A: the question is prefilled; B: it runs as sparse decode steps.")
HISTORY = typer.Option("--history", help="Answers that later turns see: self (the model's own) or gold.")
MIX = typer.Option(
    "--mix", help="Continue results that other versions, commits or machines began; config.json says so."
)
WORKERS = typer.Option("--workers", help="Processes that answer side by side, each with a model of its own.")
TOGETHER = typer.Option("--together", help="Samples that a model answers in shared steps: for a GPU, 16 or more.")
LIMIT = typer.Option("--limit", help="Take the first N samples of each task and length.")
LONGBENCH = typer.Option("--longbench", help="Folder of LongBench's files, for longbench: and mtlb: tasks.")
INFINITEBENCH = typer.Option("--infinitebench", help="Folder of InfiniteBench's files, for infinitebench: tasks.")
HAYSTACK = typer.Option("--haystack", help="prose, or file:PATH: a text of yours for natural:, ruler: and long: tasks.")
UNKNOWN = typer.Option("--allow-unknown", help="Build mtlb: tasks from LongBench files whose SHA-256 is not known.")
CORPUS = typer.Option("--corpus", help="SQuAD's or HotpotQA's JSON, for ruler:qa_1 and ruler:qa_2.")
MICRO = typer.Option("--micro", min=0, help="Samples of each task and length to take micro metrics of.")
DATA = typer.Option("--data", "-d", help="Samples made by prepare (jsonl).")
