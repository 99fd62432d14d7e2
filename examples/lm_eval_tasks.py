"""lm-eval under a policy: pip install 'saccade-llm[lm-eval]', then any of its tasks, by default one of our own."""

import sys
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

from saccade.eval.harness import SaccadeLM

TASK = {  # a task of one's own, so that nothing is downloaded: continue what was read before
    "task": "recall",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(Path(__file__).parent / "recall.jsonl")}},
    "test_split": "test",
    "output_type": "loglikelihood",
    "doc_to_text": "{{text}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}


def main(model: str = "retriever", policy: str = "flexprefill+psa", *tasks: str) -> None:
    served = SaccadeLM(model, policy, protocol="decode")
    found = lm_eval.simple_evaluate(served, tasks=[*tasks] or [TASK], task_manager=TaskManager(), bootstrap_iters=0)
    for task, scores in found["results"].items():
        print(task, {name: value for name, value in scores.items() if name != "alias"})


if __name__ == "__main__":
    main(*sys.argv[1:])
