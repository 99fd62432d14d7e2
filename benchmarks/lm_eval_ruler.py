"""RULER's tasks for lm-eval, at any length, without a download: writes a folder of tasks that its models read.

    python benchmarks/lm_eval_ruler.py Qwen/Qwen3-8B tasks --length 32768 --count 50
    python -m saccade.transformers --policy flexprefill+lfps lm_eval --model hf --include_path tasks \\
        --model_args pretrained=Qwen/Qwen3-8B,max_length=33792 --tasks ruler_32768

Prompts are plain text that ends with the answer's opening. The score is the share of the answers that are said.
"""

import argparse
import json
from pathlib import Path

from transformers import AutoTokenizer

from saccade.eval.lengths import Lengths
from saccade.eval.ruler import make

TASK = """task: {name}
tag: {tag}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answers | join(', ')}}}}"
process_results: !function said.share
generation_kwargs:
  max_gen_toks: {most}
  do_sample: false
  until: ["\\n\\n"]
metric_list:
  - metric: said
    aggregation: mean
    higher_is_better: true
"""
SCORE = """def share(doc, results):
    said = results[0].lower()
    return {"said": sum(answer.lower() in said for answer in doc["answers"]) / len(doc["answers"])}
"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tokenizer", help="a model's folder or name, as transformers takes it")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prompt and its answer")
    parser.add_argument("--count", type=int, default=20, help="samples of a task")
    parser.add_argument("--tasks", default="niah_single_1,niah_multikey_1_prose,niah_multivalue_prose,vt,qa_syn_1")
    given = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
    lengths = Lengths(lambda text: len(tokenizer.encode(text, add_special_tokens=False)))
    given.folder.mkdir(parents=True, exist_ok=True)
    (given.folder / "said.py").write_text(SCORE, encoding="utf-8")
    for task in given.tasks.split(","):
        name, most = f"{task}_{given.length}", 0
        data = (given.folder / f"{name}.jsonl").resolve()
        with data.open("w", encoding="utf-8") as file:
            for index in range(given.count):
                (turn,) = make(task, given.length, index, lengths=lengths).turns
                text = f"{turn.message()}\n{turn.prefix.lstrip()}".rstrip()
                file.write(json.dumps({"text": text, "answers": turn.answers}) + "\n")
                most = max(most, turn.max_new_tokens)
        settings = TASK.format(name=name, tag=f"ruler_{given.length}", data=data, most=most)
        (given.folder / f"{name}.yaml").write_text(settings, encoding="utf-8")


if __name__ == "__main__":
    main()
