"""Prompts answered by vLLM with a drafter directory, run by the interpreter of vLLM's own environment.

``PYTHON benchmarks/vllm_worker.py JOB OUT``, both JSON files; benchmarks/vllm_parity.py starts it. It imports
nothing of this project. One process, one thread, eager, float32, greedy.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # more of them spin against whatever else runs
}


def boolean_masks() -> None:
    """Triton's interpreter wants boolean masks in loads and stores; some kernels of vLLM pass int32."""
    import triton.runtime.interpreter as interpreter

    def casting(original, place):
        def cast(self, *arguments):
            arguments = list(arguments)
            mask = arguments[place] if len(arguments) > place else None
            if mask is not None and mask.data.dtype != bool:
                arguments[place] = interpreter.TensorHandle(mask.data.astype(bool), interpreter.tl.int1)
            return original(self, *arguments)

        return cast

    builder = interpreter.InterpreterBuilder
    builder.create_masked_load = casting(builder.create_masked_load, 1)
    builder.create_masked_store = casting(builder.create_masked_store, 2)


def main() -> None:
    """A job has target, drafter, method, n, tokens and prompts; the answer tokens and accepted drafts."""
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(SETTINGS)
    if os.environ.get("TRITON_INTERPRET") == "1":
        boolean_masks()

    import torch
    import vllm

    longest = max(map(len, job["prompts"])) + job["tokens"] + job["n"] + 1
    engine = vllm.LLM(
        job["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=longest,
        max_num_seqs=8,
        max_num_batched_tokens=max(2048, longest),
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed",
        speculative_config={
            "method": job["method"],
            "model": job["drafter"],
            "num_speculative_tokens": job["n"],
        },
    )
    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=job["tokens"])
    asked = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    answers = []
    for one in engine.generate(asked, greedy, use_tqdm=False):
        (answer,) = one.outputs
        heard = answer.spec_decode_metrics  # none for an answer that ends with the prefill's token
        answers.append(
            {
                "tokens": list(answer.token_ids),
                "accepted": heard.per_step_accepted if heard else [],
                "drafted": heard.per_step_drafted if heard else [],
            }
        )
    facts = {"vllm": vllm.__version__, "torch": torch.__version__}
    Path(sys.argv[2]).write_text(json.dumps({"facts": facts, "answers": answers}))


if __name__ == "__main__":
    main()
