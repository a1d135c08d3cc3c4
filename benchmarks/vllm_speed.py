"""vLLM answers jobs in a process of its own, run by the interpreter of its own environment.

``PYTHON benchmarks/vllm_speed.py SETTINGS`` (one JSON object: target, dtype, slots, compiled, speculative);
benchmarks/serving.py starts it. It imports nothing of this project but the file beside it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
from worker import answer_jobs  # noqa: E402  the file beside this one

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main() -> None:
    """Answer jobs of ``prompts`` (ids), ``tokens`` and ``ignore_eos``, all prompts at once, greedily."""
    asked = json.loads(sys.argv[1])
    os.environ.update(SETTINGS)
    threads = int(os.environ["OMP_NUM_THREADS"])
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, range(threads)))

    import torch
    import vllm

    engine = vllm.LLM(
        asked["target"],
        dtype=asked["dtype"],
        enforce_eager=not asked["compiled"],
        max_model_len=asked["capacity"],
        max_num_seqs=asked["slots"],
        enable_prefix_caching=False,
        speculative_config=asked["speculative"],
    )

    def answer(job: dict) -> dict:
        wanted = vllm.SamplingParams(temperature=0.0, max_tokens=job["tokens"], ignore_eos=job["ignore_eos"])
        prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        found = engine.generate(prompts, wanted, use_tqdm=False)
        return {"ids": [list(one.outputs[0].token_ids) for one in found]}

    answer_jobs(answer, {"vllm": vllm.__version__, "torch": torch.__version__})


if __name__ == "__main__":
    main()
